"""Waits, before a policy becomes active, for calls that are in progress in other threads.

A torch function that is written in Python is one op: its wrapper calls it with casts off (R8). A call that began before the policy was in
force was made by no wrapper, and what remains of it would be cast.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Collection, Iterator

from ..active import without_casts
from ..dispatch import active_ops
from ..patching import alone

# The most seconds that a conversion waits for other threads: one of them may be waiting for the thread that converts.
PATIENCE = 5.0


def wait_for(codes: Collection[types.CodeType]) -> None:
    """Returns when the calls of functions with these code objects that are in progress in other threads now have ended, or after PATIENCE
    seconds. Does not wait for calls that were made with casts off.
    """
    pending = [frame for stack in _stacks() for frame in _calls_with_casts(stack, codes)]
    give_up = time.monotonic() + PATIENCE
    while pending and time.monotonic() < give_up:
        time.sleep(0.0005)
        running = {id(frame) for stack in _stacks() for frame in stack}  # ids stay unique while `pending` holds the frames
        pending = [frame for frame in pending if id(frame) in running]


def _stacks() -> Iterator[list[types.FrameType]]:
    """The stack of each other thread, innermost call first."""
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
