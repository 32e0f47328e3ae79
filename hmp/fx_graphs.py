"""A graph of torch.fx follows the casts where it runs, as its model does: whether its code runs or an Interpreter walks through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from . import install, patches


def follow() -> None:
    """Has interpreters call what stands in a builtin's place, until patches.restore(): graphs hold torch's own builtins."""
    call_function = torch.fx.Interpreter.call_function
    patches.swap(call_function, _of_standing(patches.plain(call_function)))


def _of_standing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, target, args, kwargs: original(self, install.standing(target), args, kwargs)
