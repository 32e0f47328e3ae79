"""The calls of models and the contexts that a policy is active in: what they need stays until they have ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

# Those that have not ended → None for a call, for a context the thread that entered it.
_running: dict[object, int | None] = {}
_waiting: list[tuple[Callable[[], object], int]] = []


def begin_call() -> object:
    """Note that a call of a model has begun under its policy; return what `end()` takes."""
    call = object()
    _running[call] = None
    return call


def begin_context(context: object) -> None:
    """Note that a context is entered in this thread."""
    _running[context] = threading.get_ident()


def end(running: object) -> None:
    """Note the end of a call or context, and do what waited for it."""
    _running.pop(running, None)
    if _waiting:
        _do_what_waited()


def when_ended(act: Callable[[], object]) -> None:
    """Call `act` once no call is running and no other thread than this one is in a context: now, or when the last of them ends."""
    _waiting.append((act, threading.get_ident()))  # first: what ends from now on sees it
    _do_what_waited()


def _do_what_waited() -> None:
    for each in list(_waiting):
        if not _holds_up(each[1]):
            try:
                _waiting.remove(each)
            except ValueError:  # another thread has taken it
                continue
            each[0]()


def _holds_up(caller: int) -> bool:
    threads = [thread for thread in list(_running.values()) if thread != caller]
    return bool(threads) and (None in threads or not sys._current_frames().keys().isdisjoint(threads))
