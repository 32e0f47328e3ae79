"""torch.fx graphs are cast under the policy active where they run, whether their generated code runs or an Interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from ..patching import patches, unpatched_op
from . import placement


def follow() -> None:
    """Until patches.restore() graphs are traced with torch's own functions in them, and an Interpreter calls what replaces them."""
    patches.wrap(torch.fx.Interpreter, "call_function", _with_patched)
    patches.wrap(torch.fx.Proxy, "__torch_function__", _with_own)


def _with_own(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cls, function, *rest: original(cls, unpatched_op(function), *rest)


def _with_patched(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, target, args, kwargs: original(self, placement.patched(target), args, kwargs)
