"""Locks that a forked process finds free, and what they guard in one piece.

Only the thread that forks goes on in the child: a lock that another one holds there would be held for ever, with what it guards half
changed. So a fork waits until all of them are free.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

# The longest that a fork waits. A lock that is held longer is new in the child, whatever it guards.
PATIENCE = 10.0

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
_held_by = threading.local()


def RLock() -> threading.RLock:  # in the place of threading's
    """A `threading.RLock` that is free in a forked process."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _before() -> None:
    give_up = time.monotonic() + PATIENCE
    held: list[threading.RLock] = []
    _held_by.locks = held
    contested: threading.RLock | None = None
    while (left := give_up - time.monotonic()) > 0:
        # waits for one lock while it holds none, for whoever holds that one may wait for another
        if contested is not None:
            if not contested.acquire(timeout=left):
                return
            held.append(contested)
        contested = _take_others(held)
        if contested is None:
            return
        _release(held)


def _take_others(held: list[threading.RLock]) -> threading.RLock | None:
    """Takes all locks that are not held by now, until one is not to be had, which is given back; None for all."""
    for lock in list(_locks):
        if lock not in held:
            if not lock.acquire(blocking=False):
                return lock
            held.append(lock)
    return None


def _release(held: list[threading.RLock]) -> None:
    while held:
        held.pop().release()


def _after_in_parent() -> None:
    _release(_held_by.locks)


def _after_in_child() -> None:
    _after_in_parent()
    locks: list[Any] = list(_locks)
    for lock in locks:
        if not lock._is_owned():  # by the thread that forked, and goes on in here
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
