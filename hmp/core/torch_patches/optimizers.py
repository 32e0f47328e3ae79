"""R15: optimizer steps are never cast; their closures run under the state outside the step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import torch_private
from ..active import UnderCapturedState, call_without_casts, state
from ..cast_cache import weight_cache
from ..patching import patches, subclasses
from .module_construction import UntilReturn


def install() -> None:
    """Until patches.restore(): steps of every optimizer class run with casts off, of a class without instances from its first one on."""
    for cls in (torch.optim.Optimizer, *subclasses(torch.optim.Optimizer)):
        _patch_step(cls)

    def patch_step_function(original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(self: Any) -> None:
            original(self)
            for cls in type(self).__mro__:
                _patch_step(cls)

        return patched

    patches.wrap(*torch_private.STEP_HOOKER, patch_step_function)
    # an optimizer may hold the step that its class had before: learning rate schedulers have it do so
    patches.on_restore(register_optimizer_step_pre_hook(_off_in_step).remove)


def _patch_step(cls: type) -> None:
    step = vars(cls).get("step")
    # torch hooks a class's step when its first instance is made: only that one is what users call
    if getattr(step, "hooked", False):
        patches.wrap(cls, "step", _step)


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # the closure runs the forward pass, under the state outside the step
        args = tuple(UnderCapturedState(a) if callable(a) else a for a in args)
        if callable(kwargs.get("closure")):
            kwargs["closure"] = UnderCapturedState(kwargs["closure"])
        try:
            return call_without_casts(original, self, *args, **kwargs)
        finally:
            if weight_cache.entries():
                _free_copies(self)

    return step


def _off_in_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook that turns casts off until the step returns, where they are on: it was called past the class."""
    if not state.casts_enabled():
        return None
    closures = {name: UnderCapturedState(each) if callable(each) else each for name, each in kwargs.items()}
    given = args[0], *(UnderCapturedState(each) if callable(each) else each for each in args[1:])
    state.put(UntilReturn(state.get(), sys._getframe(1)))
    return given, closures


def _free_copies(optimizer: Any) -> None:
    """Frees the low-precision copies of weights that an optimizer has just written: stale, they would be found only at their next use."""
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group.get("params", ()):
            weight_cache.let_go(parameter)
