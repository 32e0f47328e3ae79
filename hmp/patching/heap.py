"""The objects alive that may have taken a function of torch's before it was patched: partials, and modules of models."""

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


class Holders(NamedTuple):
    """Every `functools.partial` and every `nn.Module` there is."""

    partials: list[functools.partial[Any]]
    modules: list[torch.nn.Module]


def partials_and_modules() -> Holders:
    """What is alive now. For while no collection runs: convert() sees to that."""
    with unfrozen():
        found = _of_types(functools.partial, torch.nn.Module)
    return Holders([o for o in found if type(o) is functools.partial], [o for o in found if issubclass(type(o), torch.nn.Module)])


def _of_types(*classes: type) -> list[Any]:
    """Every object whose type is one of `classes` or below one.

    In C from end to end, in one call: a list of all objects holds tuples too that another thread is making, which Python refuses to
    finish for as long as somebody else holds them. So the list is made, gone through twice side by side, and freed within that call.
    By the type and not with isinstance(), which would ask a proxy for its class; and a class is looked for among those that it inherits
    from, where no metaclass is asked for a hash.
    """
    held: dict[None, list[Any]] = {}
    objects = itertools.chain.from_iterable(map(held.setdefault, (None,), map(gc.get_objects, (None,))))
    kinds = map(type, itertools.chain.from_iterable(map(held.pop, (None,))))
    # with something after the last object: it is the kinds that end first, and let go of the list
    return list(itertools.compress(itertools.chain(objects, (None,)), map(issubclass, kinds, itertools.repeat(classes))))


def subclasses(cls: type) -> list[type]:
    """The classes below `cls` that are alive, each once."""
    found: dict[int, type] = {}  # by id, which asks no metaclass for a hash
    todo = [cls]
    while todo:
        below: list[type] = type.__subclasses__(todo.pop())
        fresh = {id(each): each for each in below if id(each) not in found}
        found |= fresh
        todo += fresh.values()
    return list(found.values())


@contextlib.contextmanager
def unfrozen() -> Iterator[None]:
    """With the objects in sight that gc.freeze() has hidden, if any; frozen again afterwards, together with what else is alive."""
    frozen = gc.get_freeze_count() > 0
    try:
        if frozen:
            gc.unfreeze()
        yield
    finally:
        if frozen:
            gc.freeze()
