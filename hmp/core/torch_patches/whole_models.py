"""R17: warns, once, where a whole model runs inside `torch.autocast(enabled=False)`, so that its policy casts nothing.

A context inside a model is the model's own float32 block. One around a model may be a script's `torch.autocast("cuda", enabled=args.amp)`
or an engine's, and whoever asked for casts gets none. They differ in the modules that are being called where the context is entered and
where the first op in it is called; they are looked at a limited number of times in a process.
"""

from __future__ import annotations

import sys
import types

import torch

from ..active import PolicyTable
from ..log import log, should_log
from ..policy import unwrapped
from .model_wrappers import CALLS, frames, running
from .module_calls import applied_policy

_MOST_LOOKS = 200  # some milliseconds
_looks_left = _MOST_LOOKS


class ContextSeen:
    """What is known of a torch.autocast context that casts are off in: where it was opened, and inside how many modules' calls."""

    __slots__ = ("around", "place")

    def __init__(self, around: int, place: str) -> None:
        self.around = around
        self.place = place

    def is_done(self, policy: PolicyTable) -> bool:
        """Return True if it is known by now, where an op is called in the context, if a whole model runs in it.

        Says so if one does, and `policy` or one that is applied to the model would be active.
        """
        modules = _running(sys._getframe(1))
        inside = modules[self.around :]
        model = next((each for each in inside if next(each.parameters(), None) is not None), None)
        if model is None:
            return _looks_left <= 0
        lists = policy.user_policy or next(filter(None, map(applied_policy, inside)), None)
        if lists is not None and _has_all_weights(model, modules[0]):
            _say(model, self.place, lists.name)
        return True


def look(frame: types.FrameType, place: str) -> ContextSeen | None:
    """Return what finds out whether a whole model runs in the context that `frame` enters, opened at `place`; None where none can."""
    if _looks_left <= 0:
        return None
    around = _running(frame)
    return ContextSeen(len(around), place) if not around or _has_all_weights(around[-1], around[0]) else None


def _running(frame: types.FrameType | None) -> list[torch.nn.Module]:
    """Return the modules that are being called at `frame`, outermost first."""
    global _looks_left
    _looks_left -= 1
    return list(dict.fromkeys(running(frames(frame, CALLS))))[::-1]


def _has_all_weights(module: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Return True if `module`, which `model` calls, is all of it but what is wrapped around it."""
    if module is model:
        return True
    own = {id(parameter) for parameter in module.parameters()}
    return all(id(parameter) in own for parameter in model.parameters())


def forget() -> None:
    """Look again, and report again what is found."""
    global _looks_left
    _looks_left = _MOST_LOOKS


def _say(model: torch.nn.Module, place: str, name: str) -> None:
    global _looks_left
    _looks_left = 0
    if should_log():
        log.warning(
            "%s runs inside torch.autocast(enabled=False), opened at %s, which switches hmp's casts off: nothing that policy %r lists is "
            "cast there. Remove that context, or enter hmp.casts() inside it",
            type(unwrapped(model)).__name__,
            place,
            name,
        )
