"""What torch.compile leaves alone: all compiled code while anybody here asks for that, and functions that it never traces."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from . import locks
from .torch_private import dynamo

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile does not trace: it breaks the graph there and calls `function`.

    As torch.compiler.disable(), but for importing Dynamo, which takes seconds.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        imported = dynamo()
        return (function if imported is None else imported.disable(function))(*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return called


def untraced_class(cls: C) -> C:
    """Have torch.compile trace none of the class's public methods, nor its `__init__`."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, classmethod):
            setattr(cls, name, classmethod(untraced(value.__func__)))
        elif inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, untraced(value))
    return cls


_lock = locks.RLock()
_asking = 0  # how many contexts ask for it
_stance: Any = None
_plain: Any = None  # torch.compile, while ours is in its place


@contextmanager
def running_uncompiled() -> Iterator[None]:
    """Make a context in which compiled code runs as it was written, until the last such context ends, in whatever order.

    A conversion may begin in a recording and end after it; torch's own stances end in the order of their beginnings alone. Dynamo, which
    takes seconds to import, is not imported for that: until it is there, the first torch.compile does it.
    """
    global _asking, _stance, _plain
    with _lock:
        _asking += 1
        if dynamo() is not None:
            _force()
        elif _plain is None:
            _plain, torch.compile = torch.compile, _compile
    try:
        yield
    finally:
        with _lock:
            _asking -= 1
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
