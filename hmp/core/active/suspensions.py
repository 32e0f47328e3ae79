"""R17, the innermost wins: regions of torch.autocast are off in this thread while a policy that became active inside them lasts.

torch keeps for each thread whether torch.autocast is enabled, by device type, and a region remembers what it found. Suspensions and regions
need not end in reverse order: a generator that is suspended in `hmp.casts()` may outlive the region around it, and end inside another one.
So each suspension keeps what is enabled outside of it, and when it ends all is as if it had not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .. import torch_private
from .state import Off, PolicyTable, call_in, current_state

P = ParamSpec("P")
R = TypeVar("R")

_any_enabled: Callable[[], bool] = torch_private.is_any_autocast_enabled
# torch's own
_set_enabled: Any = torch.set_autocast_enabled
_nest: Callable[[], int] = torch.autocast_increment_nesting
_unnest: Callable[[], int] = torch.autocast_decrement_nesting
_Devices = frozenset[str]  # device types that torch.autocast is enabled for


class _Begun:
    """What a thread keeps of a suspension. It does not refer to the Suspension, which ends when nobody does."""

    __slots__ = ("ended", "in_region", "outside")

    def __init__(self) -> None:
        self.ended = False
        self.outside: _Devices = _enabled()
        self.in_region = _is_in_region()  # of torch.autocast, enabled or not


class _Thread(threading.local):
    def __init__(self) -> None:
        self.begun: list[_Begun] = []  # suspensions that have not ended, outermost first
        self.regions: list[_Region] = []  # that were entered inside one of them and not left, outermost first
        self.takes_out = False


class _Region:
    """A region of torch.autocast, and the innermost suspension that it was entered in."""

    __slots__ = ("inside", "region")

    def __init__(self, region: Any, inside: _Begun) -> None:
        self.region = region  # torch's object: `device` is its device type, `prev` whether that was enabled before
        self.inside: _Begun | None = inside


_this = _Thread()
_alive: set[_Begun] = set()  # of any thread, that have not ended


class Suspension:
    """torch.autocast is off in this thread from the making of this until `end()`, or until nothing refers to this any more."""

    __slots__ = ("_begun", "_stack")

    def __init__(self) -> None:
        self._stack, self._begun = _this.begun, _Begun()
        _alive.add(self._begun)
        try:
            self._stack.append(self._begun)
            _enable(frozenset())
        except BaseException:  # an interrupt
            self.end()
            raise

    def end(self) -> None:
        """Has torch.autocast as it would be without this suspension; a second call does nothing.

        In another thread than it began in it ends once that thread comes past hmp's code again: its state is not to be reached from here.
        """
        self._begun.ended = True
        _alive.discard(self._begun)
        if self._stack is _this.begun:
            _take_out_ended()

    __del__ = end


def _enabled() -> _Devices:
    return frozenset(torch_private.devices_in_autocast())


def _enable(devices: _Devices) -> None:
    """Enable torch.autocast for these device types and no others."""
    enabled = _enabled()
    for device in devices ^ enabled:
        _set_enabled(device, device in devices)


def _take_out_ended() -> None:
    if _this.takes_out:  # garbage collection ended a Suspension meanwhile, which the loop below finds
        return
    stack = _this.begun
    try:
        _this.takes_out = True
        while ended := [position for position, each in enumerate(stack) if each.ended]:
            _take_out(ended[-1])
    finally:
        _this.takes_out = False


def _take_out(position: int) -> None:
    """Take a suspension off this thread's stack. The regions that were entered inside it are then inside the one around it."""
    stack = _this.begun
    ended, around = stack[position], stack[position - 1] if position else None
    # the regions around it may have ended unseen: after hmp.revert()
    outside = ended.outside if _is_in_region() or not ended.in_region else frozenset()
    devices: set[str] = set()  # of these regions
    for each in _this.regions:
        if each.inside is ended:
            device = each.region.device
            if device not in devices:
                each.region.prev = device in outside
            devices.add(device)
            each.inside = around
    _this.regions = [each for each in _this.regions if each.inside is not None]
    if position == len(stack) - 1:
        _enable((_enabled() & devices) | (outside - devices))
    else:
        within = stack[position + 1]
        within.outside = (within.outside & devices) | (outside - devices)
    del stack[position]  # last: an interrupt may come before


def end_all() -> None:
    """End every suspension, because no policy is active any more; those of other threads once they come past hmp's code."""
    for each in list(_alive):
        each.ended = True
    _alive.clear()
    _take_out_ended()


def entered(region: Any) -> None:
    """To be called when `region`, an object of torch.autocast's, was entered in this thread."""
    if _alive and _this.begun:
        _this.regions.append(_Region(region, _this.begun[-1]))


def call_where_entered(region: Any, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What `function`, which leaves `region`, returns: called as if the suspensions that began after the region was entered had not."""
    stack = _this.begun
    if not stack:
        return function(*args, **kwargs)
    _take_out_ended()
    found = next((each for each in reversed(_this.regions) if each.region is region), None)
    position = 0
    if found is not None:
        _this.regions.remove(found)
        position = next((i + 1 for i, each in enumerate(stack) if each is found.inside), 0)
    if position == len(stack):
        return function(*args, **kwargs)
    within, here = stack[position], _enabled()
    _enable(within.outside)
    try:
        return function(*args, **kwargs)
    finally:
        within.outside = _enabled()
        _enable(here)


def suspend() -> Suspension | None:
    """A Suspension, to be ended where the policy that becomes active ends; None where this thread is in no region of torch.autocast.

    In a disabled region there is nothing to switch off yet, but the policy may outlive it.
    """
    if _this.begun:
        _take_out_ended()  # what another thread has ended
    if not _any_enabled() and not _this.begun and not _is_in_region():
        return None
    return Suspension()


def _is_in_region() -> bool:
    """Return True if this thread is in a region of torch.autocast, enabled or not."""
    try:
        return _nest() > 1
    finally:
        _unnest()


def is_same_policy(state: PolicyTable | Off) -> bool:
    """Return True if `state` belongs, by its scope id, to the policy that is active here already."""
    return state.scope_id != 0 and state.scope_id == current_state().scope_id


def call_innermost(state: PolicyTable | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function`, called while `state` is active and the regions of torch.autocast around the call are off.

    Not off where `state` is what the policy active here gives other modules, by its scoped lines: no policy becomes active then.
    """
    suspension = None if (not _alive and not _any_enabled()) or is_same_policy(state) else suspend()
    if suspension is None:
        return call_in(state, None, function, args, kwargs)
    try:
        return call_in(state, None, function, args, kwargs)
    finally:
        suspension.end()
