"""Locks that are free in a forked process, with the state that they guard whole.

Only the forking thread runs on in the child process. A lock that another thread held at the fork would stay locked there for ever, and the
state that it guards half changed. So a fork first takes all locks made here; parent and child release them after it.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
import weakref
from typing import Any

# Seconds that a fork waits at most. A lock that another thread holds longer is reset in the child, whatever state it guards.
PATIENCE = 10.0


class _Lock(_thread.RLock):  # type: ignore[misc]  # final in typeshed alone
    """A lock that an interrupt (Ctrl-C) does not leave locked.

    Python 3.14 raises one between a builtin `__enter__` and the block of its `with`, but not after an operator, nor where a Python function
    returns, unless Dynamo runs frames.
    """

    __pos__ = _thread.RLock.acquire

    def __enter__(self) -> bool:  # type: ignore[override]
        return +self


# In the order in which they were made: a module's lock after those of the modules that it imports, and calls while it holds its own.
_locks: weakref.WeakKeyDictionary[threading.RLock, None] = weakref.WeakKeyDictionary()
_held_by = threading.local()


def RLock() -> threading.RLock:  # instead of threading's
    """Return a `threading.RLock` that is free in a forked process."""
    lock = _Lock()
    _locks[lock] = None
    return lock


def _before() -> None:
    """Take all locks for the forking thread, the outer ones first, or those that it gets in PATIENCE seconds."""
    give_up = time.monotonic() + PATIENCE
    _held_by.locks = [lock for lock in reversed(list(_locks)) if lock.acquire(timeout=max(give_up - time.monotonic(), 0))]


def _after_in_parent() -> None:
    for lock in _held_by.locks:
        lock.release()
    _held_by.locks = []


def _after_in_child() -> None:
    _after_in_parent()
    locks: list[Any] = list(_locks)
    for lock in locks:
        if not lock._is_owned():  # one that the forking thread holds is its own to release
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
