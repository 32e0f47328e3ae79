"""R17, the innermost wins: regions of torch.autocast are off in this thread while a policy that came into force inside them lasts.

torch keeps whether torch.autocast is enabled for each thread, and so does this: a Suspension belongs to the thread that it began in.
Suspensions need not end in reverse order, nor before the region that they switched off (a generator that is suspended in `hmp.casts()`
may outlive it). So each thread has a stack of torch's guards; what ends below the top is taken out as if what lies above had not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .. import torch_private
from .state import CompiledPolicy, Off, call_under, current_state

P = ParamSpec("P")
R = TypeVar("R")

_any_enabled: Callable[[], bool] = torch_private.is_any_autocast_enabled


class _Begun:
    """A guard of torch's on a thread's stack. It is freed in its own thread: it refers to that thread's memory."""

    __slots__ = ("ended", "guard")

    def __init__(self) -> None:
        self.guard: Any = torch_private.autocast_off()
        self.ended = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Begun] = []


_this = _Thread()
# One item for each suspension, of any thread, that has not ended. Only whether it is empty is read.
_alive: list[None] = []


class Suspension:
    """torch.autocast is off in this thread from `begin()` until `end()`, or until nothing refers to this any more."""

    __slots__ = ("_begun", "_stack")

    def __init__(self) -> None:
        self._stack = _this.stack
        self._begun = _Begun()
        _alive.append(None)
        self._stack.append(self._begun)
        self._begun.guard.__enter__()

    def end(self) -> None:
        """Has torch.autocast as it would be without this suspension; a second call does nothing.

        In another thread than it began in it ends once that thread comes past hmp's code again: its state is not to be reached from here.
        """
        begun, stack = self._begun, self._stack
        if begun.ended:
            return
        begun.ended = True
        _alive.pop()
        if stack is _this.stack:
            _take_out_ended(stack)

    __del__ = end


def _take_out_ended(stack: list[_Begun]) -> None:
    while stack and stack[-1].ended:
        stack[-1].guard.__exit__(None, None, None)
        stack.pop()
    first = next((i for i, begun in enumerate(stack) if begun.ended), None)
    if first is not None:
        call_outside(first, _nothing)


def _nothing() -> None: ...


def depth() -> int:
    """How many suspensions have not ended in this thread."""
    return len(_this.stack) if _alive else 0


def call_outside(position: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What `function` returns, called as if this thread's suspensions from `position` on, counted from the outermost, had not begun."""
    stack = _this.stack
    for begun in reversed(stack[position:]):
        begun.guard.__exit__(None, None, None)
    try:
        return function(*args, **kwargs)
    finally:
        stack[position:] = [begun for begun in stack[position:] if not begun.ended]
        for begun in stack[position:]:
            begun.guard.__enter__()


def suspend() -> Suspension | None:
    """A Suspension, to be ended where the policy that comes into force ends; None where this thread is in no region of torch.autocast."""
    if _alive or not _any_enabled():
        _take_out_ended(_this.stack)  # what another thread has ended
        if not _any_enabled() and not _this.stack:
            return None
    return Suspension()


def is_same_policy(state: CompiledPolicy | Off) -> bool:
    """Whether `state` belongs, by its scope id, to the policy that is in force here already."""
    return state.scope_id != 0 and state.scope_id == current_state().scope_id


def call_innermost(state: CompiledPolicy | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function`, called while `state` is in force and the regions of torch.autocast around the call are off.

    Not off where `state` is what the policy in force here gives other modules, by its scoped lines: no policy comes into force then.
    """
    if not _alive and not _any_enabled():
        return call_under(state, function, *args, **kwargs)
    suspension = None if is_same_policy(state) else suspend()
    if suspension is None:
        return call_under(state, function, *args, **kwargs)
    try:
        return call_under(state, function, *args, **kwargs)
    finally:
        suspension.end()
