"""The inner context takes precedence: contexts of torch.autocast are off while a policy that became active inside them lasts (rule R17).

torch stores for each thread and device type whether torch.autocast is enabled, and a context of torch.autocast restores what it found.
Suspensions and contexts need not end in reverse order: a generator that is suspended in `hmp.casts()` may outlive the context around it,
and end inside another one. So each remembers what was enabled outside of it, and at its end hands that to the next one inside it, or to
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .. import torch_private
from .state import Off, PolicyTable, begin_call, begin_outermost, call_under, current_state, end_running

P = ParamSpec("P")
R = TypeVar("R")

# torch's own
_set_enabled: Any = torch.set_autocast_enabled
_nest: Callable[[], int] = torch.autocast_increment_nesting
_unnest: Callable[[], int] = torch.autocast_decrement_nesting


class _Change:
    """What a thread has enabled changed here: a suspension began, or inside one a context of torch.autocast."""

    __slots__ = ("_in_region", "_outside", "ended", "region")

    def __init__(self, region: Any = None) -> None:
        self.region = region  # torch's object; None for a suspension, which changes all devices
        self.ended = False
        self._outside = set(torch_private.devices_in_autocast())
        self._in_region = _is_in_region()  # of torch.autocast, enabled or not

    def concerns(self, device: str) -> bool:
        return self.region is None or self.region.device == device

    def enabled_outside(self) -> set[str]:
        """Return the device types that were enabled before."""
        if self.region is not None:
            return {self.region.device} if self.region.prev else set()
        # after hmp.revert() the contexts around it may have ended unseen
        return self._outside if _is_in_region() or not self._in_region else set()

    def put_outside(self, device: str, is_enabled: bool) -> None:
        """Have the end of this leave the device enabled or disabled."""
        if self.region is not None:
            self.region.prev = is_enabled
        else:
            (self._outside.add if is_enabled else self._outside.discard)(device)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.changes: list[_Change] = []  # that have not ended, outermost first, from the first suspension on
        self.is_settling = False


_this = _Thread()
_alive: set[_Change] = set()  # the suspensions of all threads that have not ended


class Suspension:
    """torch.autocast is off in this thread while this object exists, or until `end()`."""

    __slots__ = ("_change", "_changes")

    def __init__(self) -> None:
        self._changes, self._change = _this.changes, _Change()
        self._changes.append(self._change)
        _alive.add(self._change)
        _enable(set())

    def end(self) -> None:
        """Restore torch.autocast as it would be without this suspension. A second call does nothing.

        Called from another thread, it takes effect when its own thread next runs hmp's code: the state of a thread is out of reach here.
        """
        self._change.ended = True
        _alive.discard(self._change)
        if self._changes is _this.changes:
            _settle()

    __del__ = end


def _enable(devices: set[str]) -> None:
    """Enable torch.autocast for these device types and no others."""
    for device in devices.symmetric_difference(torch_private.devices_in_autocast()):
        _set_enabled(device, device in devices)


def _settle() -> None:
    """Take out the suspensions of this thread that have ended."""
    if _this.is_settling:  # called by the garbage collector: the loop below finds what it ended
        return
    changes = _this.changes
    try:
        _this.is_settling = True
        while ended := [each for each in changes if each.ended]:
            _take_out(ended[0])
        while changes and changes[0].region is not None:
            del changes[0]
    finally:
        _this.is_settling = False


def _take_out(ended: _Change) -> None:
    changes = _this.changes
    inside = changes[changes.index(ended) + 1 :]
    outside, enabled = ended.enabled_outside(), set(torch_private.devices_in_autocast())
    for device in filter(ended.concerns, torch_private.devices_of_autocast()):
        next_one = next((each for each in inside if each.concerns(device)), None)
        if next_one is not None:
            next_one.put_outside(device, device in outside)
        elif (device in outside) is not (device in enabled):
            _set_enabled(device, device in outside)
    changes.remove(ended)


def end_all() -> None:
    """End every suspension, because no policy is active any more; those of other threads when they next run hmp's code."""
    for each in list(_alive):
        each.ended = True
    _alive.clear()
    _settle()


def entered(region: Any) -> None:
    """Store that `region`, an object of torch.autocast's, was entered in this thread."""
    if _this.changes:
        _this.changes.append(_Change(region))


def leave(region: Any, exit_region: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `exit_region`, which leaves `region`, as without the suspensions that began after it was entered; return its result."""
    _settle()
    changes = _this.changes
    if not changes:
        return exit_region(*args, **kwargs)
    here = set(torch_private.devices_in_autocast())
    try:
        return exit_region(*args, **kwargs)
    finally:
        _enable(here)
        found = next((each for each in reversed(changes) if each.region is region), None)
        if found is None:  # it was entered outside of all of them
            changes[0].put_outside(region.device, region.prev)
        else:
            _take_out(found)


def suspend() -> Suspension | None:
    """Return a Suspension, which lasts as long as the new policy, or None outside contexts of torch.autocast.

    In a disabled context there is nothing to switch off yet, but the policy may outlive it.
    """
    _settle()  # those that another thread has ended
    return Suspension() if _this.changes or torch_private.is_any_autocast_enabled() or _is_in_region() else None


def _is_in_region() -> bool:
    """Return True if this thread is in a context of torch.autocast, enabled or not."""
    try:
        return _nest() > 1
    finally:
        _unnest()


def call_innermost(state: PolicyTable | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` while `state` is active and contexts of torch.autocast around it are off, and return its result.

    They stay on if `state` is that of the active policy for other modules, by its scoped entries: no policy becomes active then.
    """
    is_same_policy = state.scope_id != 0 and state.scope_id == current_state().scope_id
    call, outermost, suspension = begin_call(), begin_outermost(), None
    try:
        suspension = None if is_same_policy else suspend()
        return call_under(state, function, *args, **kwargs)
    finally:
        if suspension is not None:
            suspension.end()
        if outermost is not None:
            outermost.end()
        end_running(call)
