"""Locks that are free in a forked process: a lock that another thread held at the fork would stay locked there for ever."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def RLock() -> threading.RLock:  # instead of threading's
    """Return a `threading.RLock` that is free in a forked process."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _reset() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # one that the forking thread holds is its own to release
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
