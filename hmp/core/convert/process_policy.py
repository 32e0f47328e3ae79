"""The policy of the process, changed so that every op of every thread runs wholly under the old one or wholly under the new one."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ..active import PROCESS, PolicyTable, Replacements, without_casts
from ..dispatch import active_ops
from ..patching import alone

# The most seconds that a conversion waits for other threads: one of them may be waiting for the thread that converts.
PATIENCE = 5.0


def switch_to(table: PolicyTable) -> None:
    """Make `table` active for the process.

    A call of a builtin always does. A torch function written in Python calls many builtins, and is one op because its wrapper calls it with
    casts off (R8). So while there are other threads, those functions that only one of the two policies changes have, until the change is
    over, a replacement that does nothing else.
    """
    old = PROCESS
    if not alone():
        single = _as_single_ops(table.replacements.functions - old.replacements.functions)
        if single:
            _set_process_policy(_and(old, single))
            wait_for_calls({function.__code__ for function in single})
        single = _as_single_ops(old.replacements.functions - table.replacements.functions)
        if single:
            _set_process_policy(_and(table, single))
    _set_process_policy(table)


def _and(table: PolicyTable, single: Mapping[Any, Callable[..., Any]]) -> PolicyTable:
    """Return `table` with the replacements `single` for functions that it leaves as they are."""
    own = table.replacements
    both = Replacements(own.functions | single.keys(), lambda function: single.get(function) or own[function])
    return PolicyTable(both, table.policy, table.user_policy, table.scope_id)


def _as_single_ops(functions: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """Return a replacement for each of the functions that is written in Python: it calls torch's own code with casts off."""
    return {f: without_casts(f) for f in functions if isinstance(f, types.FunctionType)}


def _set_process_policy(table: PolicyTable) -> None:
    PROCESS.replacements, PROCESS.policy = table.replacements, table.policy
    PROCESS.user_policy, PROCESS.scope_id = table.user_policy, table.scope_id


def wait_for_calls(codes: Collection[types.CodeType]) -> None:
    """Return when other threads' calls of functions with these code objects have ended, or after PATIENCE seconds.

    A torch function that is written in Python is one op: its wrapper calls it with casts off (R8). A call that began before the policy was
    active was made by no wrapper, and what remains of it would be cast. Calls that were made with casts off are not waited for.
    """
    pending = [frame for stack in _stacks() for frame in _calls_with_casts(stack, codes)]
    give_up = time.monotonic() + PATIENCE
    while pending and time.monotonic() < give_up:
        time.sleep(0.0005)
        running = {id(frame) for stack in _stacks() for frame in stack}  # ids stay unique while `pending` holds the frames
        pending = [frame for frame in pending if id(frame) in running]


def _stacks() -> Iterator[list[types.FrameType]]:
    """Yield the stack of each other thread, innermost call first."""
    own = threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        if thread != own:
            frames: list[types.FrameType] = []
            frame: types.FrameType | None = innermost
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
            yield frames


def _calls_with_casts(stack: list[types.FrameType], codes: Collection[types.CodeType]) -> list[types.FrameType]:
    # patched ops that have yet to call; they may be inside functions that read the state
    found = [frame for frame in stack[:3] if frame.f_code in active_ops.CODES]
    for frame in stack:
        if frame.f_code is _WITHOUT_CASTS:
            found.clear()  # they were called with casts off
        elif frame.f_code in codes:
            found.append(frame)
    return found


_WITHOUT_CASTS: types.CodeType = without_casts(alone).__code__
