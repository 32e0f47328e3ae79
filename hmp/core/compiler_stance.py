"""Compiled code runs as it was written, while anybody here asks for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import locks
from .torch_private import dynamo

_lock = locks.RLock()
_asking: list[object] = []
_stance: Any = None
_plain: Any = None  # torch.compile, while ours is in its place


@contextmanager
def running_uncompiled() -> Iterator[None]:
    """Make a context in which compiled code runs as it was written."""
    asks = object()
    try:
        run_uncompiled(asks)
        yield
    finally:
        run_compiled(asks)


def run_uncompiled(asks: object) -> None:
    """Have compiled code run as it was written until `run_compiled` was called for each that asks, in whatever order.

    A conversion may begin in a recording and end after it. torch's own stances end in the order of their beginnings alone. Dynamo, which
    takes seconds to import, is not imported for that: until it is there, the first torch.compile does it.
    """
    global _plain
    with _lock:
        _asking.append(asks)
        if dynamo() is not None:
            _force()
        elif _plain is None:
            _plain, torch.compile = torch.compile, _compile


def run_compiled(asks: object) -> None:
    """Take back what `asks` asked for. May be called again, after an interrupt."""
    global _stance, _plain
    with _lock:
        if asks in _asking:
            _asking.remove(asks)
        if not _asking and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None
        if not _asking and torch.compile is _compile:  # else somebody's is around ours, which does nothing now
            torch.compile, _plain = _plain, None


def _force() -> None:
    global _stance
    if _stance is None:
        _stance = torch.compiler.set_stance("force_eager")


def _compile(*args: Any, **kwargs: Any) -> Any:
    with _lock:
        if _asking:
            _force()
        plain = torch.compile if _plain is None else _plain  # ours is called late where somebody kept it
    return plain(*args, **kwargs)
