"""Casts are off while a module is constructed or loaded, also in threads that are started meanwhile (rule R9).

transformers copies weights in a pool of threads, and a thread does not inherit the state of the thread that started it. So a thread that is
started inside a load, and a task that is submitted to a pool there, run with casts off until that load ends.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ..patching import patches
from . import state
from .regions import without_casts

_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


class _Load:
    """One outermost call of a constructor or a loading function."""

    __slots__ = ("has_ended",)

    def __init__(self) -> None:
        self.has_ended = False


_current: ContextVar[_Load | None] = ContextVar("hmp_load", default=None)


class OffWhileLoading(state.OffUntil):
    """The state of a thread or task that a load has started."""

    __slots__ = ("_load",)

    def __init__(self, load: _Load) -> None:
        super().__init__()
        self._load = load

    def has_ended(self) -> bool:
        """Return True if the load has ended."""
        return self._load.has_ended


def install() -> None:
    """Have threads and tasks inherit a load, until patches.restore()."""
    patches.wrap(threading.Thread, "start", _starting)
    patches.wrap(concurrent.futures.thread.ThreadPoolExecutor, "submit", _submitting)


def is_needed() -> bool:
    """Return True if something would be cast in a constructor that is called now, by this thread or by one that it starts."""
    return state.casts_enabled() or (not _compiling() and state.PROCESS.policy is not None and _load_here() is None)


def while_loading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` with casts off, in this thread and in those that it starts meanwhile."""
    uncast = without_casts(function)

    def called_while_loading(*args: Any, **kwargs: Any) -> Any:
        if _compiling() or _load_here() is not None:  # compiled code starts no thread
            return uncast(*args, **kwargs)
        load, before = _Load(), _current.get()
        try:  # an interrupt may come right after the call
            _current.set(load)
            return uncast(*args, **kwargs)
        finally:
            load.has_ended = True  # first: threads that inherited the load read it
            _current.set(before)

    return called_while_loading


def _load_here() -> _Load | None:
    found = _current.get()
    return None if found is None or found.has_ended else found


def _starting(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def start(self: threading.Thread) -> None:
        load = _load_here()
        if load is not None:
            self.run = _inheriting(load, self.run)  # type: ignore[method-assign]
        original(self)

    return start


def _submitting(original: Callable[..., Any]) -> Callable[..., Any]:
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        load = _load_here()
        return original(self, fn if load is None else _inheriting(load, fn), *args, **kwargs)

    return submit


def _inheriting(load: _Load, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before, outer = state.get(), _current.get()
        try:  # an interrupt may come right after either call
            _current.set(load)
            OffWhileLoading(load).begin()
            return function(*args, **kwargs)
        finally:
            state.put(before)
            _current.set(outer)

    return run
