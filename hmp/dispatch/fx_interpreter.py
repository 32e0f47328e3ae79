"""A graph of torch.fx follows the casts where it runs, as its model does: whether its code runs or an Interpreter walks through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from ..patching import patches, stand_ins
from . import placement


def follow() -> None:
    """Has graphs hold torch's own builtins, and interpreters call what stands in their place, until patches.restore()."""
    call_function = torch.fx.Interpreter.call_function
    handed: Any = torch.fx.Proxy.__torch_function__
    patches.swap(call_function, _of_standing(patches.plain(call_function)))
    patches.swap(handed.__func__, _with_own(patches.plain(handed.__func__)))


def _with_own(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cls, function, *rest: original(cls, stand_ins.own(function), *rest)


def _of_standing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, target, args, kwargs: original(self, placement.standing(target), args, kwargs)
