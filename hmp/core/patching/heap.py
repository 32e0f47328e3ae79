"""Finds objects among all that are alive: partials and modules, which may hold one of torch's functions, and subclasses."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


def alone() -> bool:
    """Whether no other thread runs Python code."""
    return len(sys._current_frames()) == 1


class PartialsAndModules(NamedTuple):
    """Every `functools.partial` and every `nn.Module` alive."""

    partials: list[functools.partial[Any]]
    modules: list[torch.nn.Module]


def partials_and_modules() -> PartialsAndModules:
    """Those that are alive now. To be called while the garbage collector is paused, as convert() does."""
    with unfrozen():
        found = _of_types(functools.partial, torch.nn.Module)
    return PartialsAndModules(
        [o for o in found if type(o) is functools.partial], [o for o in found if issubclass(type(o), torch.nn.Module)]
    )


def _of_types(*classes: type) -> list[Any]:
    """Every object whose type is one of `classes` or a subclass of one.

    gc.get_objects() returns tuples too that another thread is still building, and CPython raises SystemError in that thread if a second
    reference to such a tuple exists. So the list is made, iterated over and freed inside one call of C code, in which no other thread runs.
    The test is `issubclass(type(object), classes)`: isinstance() would ask a proxy for its `__class__`, and a look-up in a set would call
    `__hash__` of metaclasses.
    """
    shared: dict[None, list[Any]] = {}  # passes the list from one iterator to the other
    objects = itertools.chain.from_iterable(map(shared.setdefault, (None,), map(gc.get_objects, (None,))))
    kinds = map(type, itertools.chain.from_iterable(map(shared.pop, (None,))))
    # one more item in `objects`, so that `kinds` ends first and frees the list
    return list(itertools.compress(itertools.chain(objects, (None,)), map(issubclass, kinds, itertools.repeat(classes))))


def subclasses(cls: type) -> list[type]:
    """All subclasses of `cls`, direct or not, each once."""
    found: dict[int, type] = {}  # by id: a metaclass may define no hash
    todo = [cls]
    while todo:
        below: list[type] = type.__subclasses__(todo.pop())
        fresh = {id(each): each for each in below if id(each) not in found}
        found |= fresh
        todo += fresh.values()
    return list(found.values())


@contextlib.contextmanager
def unfrozen() -> Iterator[None]:
    """Context manager in which gc finds objects that gc.freeze() has hidden, too. If any were, it freezes all objects alive at its end."""
    frozen = gc.get_freeze_count() > 0
    try:
        if frozen:
            gc.unfreeze()
        yield
    finally:
        if frozen:
            gc.freeze()
