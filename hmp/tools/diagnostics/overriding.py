"""Who has the last word on an op here and now, in the place of the lists of the policy around it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...core.active import InBackward, Off, is_by_user, state
from ...core.policy import unwrapped
from ...core.torch_patches import around_models, autocast, module_calls
from ...core.torch_private import is_any_autocast_enabled


class Overrider(NamedTuple):
    """`kind` is "region" (an enabled region of torch.autocast), "island" (a disabled one), "disable_casts", "outside" (of an applied
    model's calls) or "backward"; `words` say which, with the line that opened a region."""

    kind: str
    words: str


def over_casts() -> Overrider | None:
    """Who casts once more what hmp has cast: a region of torch.autocast; None for nobody."""
    return Overrider("region", f"torch.autocast, enabled{_opened(enabled=True)}") if is_any_autocast_enabled() else None


def overridden(running: Iterable[torch.nn.Module]) -> Any:
    """The policy in whose place casts are off here, inside calls of the modules `running`, outermost first; None for none."""
    here = state.current_state()
    return module_calls.policy_if_casts_were_on(here, running) if isinstance(here, Off) else None


class AppliedParts:
    """Finds for submodules of applied models, which run outside of any policy, the model. It looks once, until a mark changes."""

    def __init__(self) -> None:
        self._changes = -1
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module] | None] = weakref.WeakKeyDictionary()

    def model_of(self, running: Sequence[torch.nn.Module]) -> tuple[torch.nn.Module, Any] | None:
        """The applied model that the innermost of the modules `running`, outermost first, is a part of, and the policy that would be in
        force in that part inside a call of the model; None without one."""
        if self._changes != module_calls.changes():
            self._models.clear()
            self._changes = module_calls.changes()
        inner = running[-1]
        if inner not in self._models:
            model = module_calls.applied_around(inner)
            self._models[inner] = None if model is None else weakref.ref(model)
        found = self._models[inner]
        model = None if found is None else found()
        return None if model is None else (model, module_calls.policy_inside(model, running))


def outside_of(model: torch.nn.Module) -> Overrider:
    """Who called a part of the applied `model` outside of its calls: the method of it that runs, where one does."""
    model = unwrapped(model)[1]
    steps = around_models.frames(sys._getframe(1))
    method = next((f"{step.code.co_name}() of " for step in steps if step.local("".join(step.code.co_varnames[:1])) is model), "")
    return Overrider("outside", f"{method}{type(model).__name__}, outside of any call of it")


def is_around_a_forward() -> bool:
    """Whether a hook of a module runs here, or the code of a wrapper around a model, and not a model's own forward."""
    steps = list(around_models.frames(sys._getframe(1), around_models.CALLS))
    torchs = (i for i, step in enumerate(steps) if step.code.co_filename == around_models.TORCHS)
    called = next(torchs, None)
    return called is not None and (called == 0 or around_models.is_of_wrapper(steps))


def in_place_of_casts() -> Overrider | None:
    """Who has switched casts off; None where they are on, and where hmp did for torch's own code (R8, R15): no list speaks of that."""
    here = state.current_state()
    if isinstance(here, autocast.Paused):
        return Overrider("island", f"torch.autocast(enabled=False){_opened(enabled=False)}") if here.disabled else None
    if isinstance(here, InBackward):
        return Overrider("backward", "autograd's backward: no list applies to Python that it calls (R13)")
    return Overrider("disable_casts", "disable_casts()") if here.disabled and is_by_user() else None


def _opened(enabled: bool) -> str:
    place = autocast.opened_at(enabled)
    return f" at {place}" if place else ""
