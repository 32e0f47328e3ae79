"""The objects alive that may have taken a function of torch's before it was patched: partials, and modules of models."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch


def alone() -> bool:
    """Whether no other thread runs Python code."""
    return len(sys._current_frames()) == 1


class Holders(NamedTuple):
    """Every `functools.partial` and every `nn.Module` there is."""

    partials: list[functools.partial[Any]]
    modules: list[torch.nn.Module]


# What the last search found, and how often older objects had been collected before it.
_known: list[weakref.ref[Any]] = []
_collected: tuple[int, ...] | None = None


# A parameter refers to its class, and some 40 things of torch's do: with more there is a model, and no need to look for its parameters.
_FEW = 64


def partials_and_modules() -> Holders:
    """What is alive now. For while no collection runs: convert() sees to that."""
    global _collected
    with unfrozen() as was_frozen:
        now = None if was_frozen else _collections()
        found = None
        if now is not None and now == _collected:
            # no object has grown old since the last search: those that are new are among the young ones
            young = _of_types({functools.partial, *_module_classes()}, 0, 1)
            before = [o for o in [reference() for reference in _known] if o is not None]
            found = _chosen({id(o): o for o in (*before, *young)}.values(), _module_classes())
        if found is None or _collections() != now:
            found = None
            if sys.getrefcount(torch.nn.Parameter) < _FEW:
                # a partial refers to its class, and so does a parameter: a loop in C over all objects
                found = _chosen(gc.get_referrers(functools.partial, torch.nn.Parameter), {torch.nn.Parameter})
            if found is None or found.modules:
                # there are models: another loop over all objects, in a few times the time
                found = _chosen(_of_types({functools.partial, *_module_classes()}, 0, 1, 2), _module_classes())
            _collected = now
    _known[:] = [weakref.ref(o) for o in (*found.partials, *found.modules)]
    return found


def _of_types(classes: set[type], *generations: int) -> list[Any]:
    """Every object that is of exactly one of `classes`, in these generations. For while no collection runs.

    In C from end to end, in one call: a list of all objects holds tuples too that another thread is making, which Python refuses to
    finish for as long as somebody else holds them. So both lists are made, gone through side by side, and freed within that call; the
    second one has at its end what the first one's making has brought, and beside that stands None. Where there is no other thread one
    list does.
    """
    if alone():
        found: list[Any] = []
        for generation in generations:
            objects = gc.get_objects(generation)
            found += itertools.compress(objects, map(classes.__contains__, map(type, objects)))
        return found
    of_type = [
        itertools.compress(
            itertools.chain(_listed(generation), itertools.repeat(None)), map(classes.__contains__, map(type, _listed(generation)))
        )
        for generation in generations
    ]
    return list(itertools.chain.from_iterable(of_type))


def _listed(generation: int) -> Iterator[Any]:
    """The objects of a generation, listed when the first one is asked for."""
    return itertools.chain.from_iterable(map(gc.get_objects, (generation,)))


def _chosen(objects: Iterable[Any], classes: set[type]) -> Holders:
    """The partials among `objects`, and the instances of `classes`."""
    wanted = {id(functools.partial), *map(id, classes)}
    # by type and not with isinstance(), which would ask a proxy for its class; by id, which asks no metaclass for a hash
    chosen = [o for o in objects if id(type(o)) in wanted]
    return Holders([o for o in chosen if type(o) is functools.partial], [o for o in chosen if type(o) is not functools.partial])


def _module_classes() -> set[type]:
    return {torch.nn.Module, *subclasses(torch.nn.Module)}


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


def _collections() -> tuple[int, ...] | None:
    """How often objects were moved to the oldest generation; None where this Python's collector may work otherwise."""
    return tuple(each["collections"] for each in gc.get_stats()[1:]) if sys.version_info < (3, 13) else None


@contextlib.contextmanager
def unfrozen() -> Iterator[bool]:
    """With the objects in sight that gc.freeze() has hidden, if any; frozen again afterwards, together with what else is alive."""
    frozen = gc.get_freeze_count() > 0
    try:
        if frozen:
            gc.unfreeze()
        yield frozen
    finally:
        if frozen:
            gc.freeze()
