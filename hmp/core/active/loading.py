"""Casts are off while a module is constructed or loaded, also in threads that are started meanwhile (rule R9).

transformers copies weights in a pool of threads, and a thread does not inherit the state of the thread that started it. So a thread that is
started inside a load, and a task that is submitted to a pool there, run with casts off until that load ends.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..patching import patches
from . import state

_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


class _Loading(state.OffUntil):
    """The state in one call of a constructor or a loading function, and in a thread or task that was started in `load`."""

    __slots__ = ("_load", "has_returned")

    def __init__(self, load: _Loading | None = None) -> None:
        super().__init__()
        self.has_returned = False
        self._load: _Loading = self if load is None else load._load

    def has_ended(self) -> bool:
        """Return True if the load has ended."""
        return self._load.has_returned


def install() -> None:
    """Have threads and tasks inherit a load, until patches.restore()."""
    patches.wrap(threading.Thread, "start", _starting)
    patches.wrap(concurrent.futures.thread.ThreadPoolExecutor, "submit", _submitting)


def is_needed() -> bool:
    """Return True if something would be cast in a constructor that is called now, by this thread or by one that it starts."""
    return state.casts_enabled() or (not _compiling() and state.PROCESS.policy is not None and _load_here() is None)


def while_loading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` with casts off, in this thread and in those that it starts meanwhile."""

    def called_while_loading(*args: Any, **kwargs: Any) -> Any:
        if _compiling():  # compiled code starts no thread
            return state.call_without_casts(function, *args, **kwargs)
        load, before = _Loading(), state.get()
        try:  # an interrupt may come right after the call
            load.begin()
            return function(*args, **kwargs)
        finally:
            load.has_returned = True  # first: threads that inherited the load read it
            state.put(before)

    return called_while_loading


def _load_here() -> _Loading | None:
    """Return the load that this thread or task is in; None for none."""
    value = state.get()
    while isinstance(value, state.EnteredRegion):
        if isinstance(value, _Loading) and not value.has_ended():
            return value
        value = value.before
    return None


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


def _inheriting(load: _Loading, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = state.get()
        try:  # an interrupt may come right after the call
            _Loading(load).begin()
            return function(*args, **kwargs)
        finally:
            state.put(before)

    return run
