"""Locks that are free in a forked process: a lock that another thread held at the fork would stay locked there for ever."""

from __future__ import annotations

import os
import threading
from typing import Any


def RLock() -> Any:  # instead of threading's
    """Return a `threading.RLock`, one of a module and as lasting, that is free in a forked process."""
    lock: Any = threading.RLock()
    if hasattr(os, "register_at_fork"):  # one that the forking thread holds is its own to release
        os.register_at_fork(after_in_child=lambda: lock._is_owned() or lock._at_fork_reinit())
    return lock
