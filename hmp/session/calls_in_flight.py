"""Waits, before a policy comes into force, for calls that other threads are in the middle of.

A torch function that is written in Python is one op, inside which nothing is cast again (R8): its wrapper sees to that. A call that began
before the policy was in force has no wrapper around it, and the second half of it would be cast.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Collection, Iterator

from ..context import without_casts
from ..patching import alone, is_dispatcher

# The longest that a conversion waits for other threads: one of them may be waiting for the thread that converts.
PATIENCE = 5.0


def wait_for(codes: Collection[types.CodeType]) -> None:
    """Returns when all calls that other threads are in now of functions with one of these codes have ended, or after PATIENCE seconds.

    It does not wait for calls made with casts off.
    """
    pending = [frame for stack in _stacks() for frame in _unmuted(stack, codes)]
    give_up = time.monotonic() + PATIENCE
    while pending and time.monotonic() < give_up:
        time.sleep(0.0005)
        running = {id(frame) for stack in _stacks() for frame in stack}  # no other frame has the id of one that is held
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


def _unmuted(stack: list[types.FrameType], codes: Collection[types.CodeType]) -> list[types.FrameType]:
    # a dispatcher that has decided and not called yet; it may still be in what it asks
    found = [frame for frame in stack[:3] if is_dispatcher(frame.f_code)]
    for frame in stack:
        if frame.f_code is _MUTED:
            found.clear()  # they run inside this one
        elif frame.f_code in codes:
            found.append(frame)
    return found


_MUTED: types.CodeType = without_casts(alone).__code__
