"""The objects alive that may have taken a function of torch's before it was patched: partials, and modules of models."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from . import in_flight


class Living(NamedTuple):
    """Every `functools.partial` and every `nn.Module` there is."""

    partials: list[functools.partial[Any]]
    modules: list[torch.nn.Module]


_FEW = 50_000  # with more objects the search in C is the faster one
# What the last search found, and how often older objects had been collected before it.
_known: list[weakref.ref[Any]] = []
_collected: tuple[int, ...] | None = None


def find() -> Living:
    """What is alive now."""
    global _collected
    with unfrozen() as was_frozen:
        # a list of all objects holds tuples too that another thread is making, which Python then refuses to finish
        alone = in_flight.alone()
        now = _collections() if alone and not was_frozen else None
        found = None
        if now is not None and now == _collected:
            # no object has grown old since the last search: those that are new are among the young ones
            young = [*gc.get_objects(0), *gc.get_objects(1)]
            if len(young) < _FEW:
                before = [o for o in [reference() for reference in _known] if o is not None]
                found = _chosen({id(o): o for o in (*before, *young)}.values(), _module_classes())
        if found is None or _collections() != now:
            # a partial refers to its class, and so does a parameter: a loop in C over all objects
            found = _chosen(gc.get_referrers(functools.partial, torch.nn.Parameter), {torch.nn.Parameter})
            if found.modules:
                # there are models: a loop in Python over all objects takes twice the time, and what refers to any of many classes ten times
                classes = _module_classes()
                found = Living(found.partials, _chosen(gc.get_objects() if alone else gc.get_referrers(*classes), classes).modules)
            _collected = now
    _known[:] = [weakref.ref(o) for o in (*found.partials, *found.modules)]
    return found


def _chosen(objects: Iterable[Any], classes: set[type]) -> Living:
    """The partials among `objects`, and the instances of `classes`."""
    wanted = {id(functools.partial), *map(id, classes)}
    # by type and not with isinstance(), which would ask a proxy for its class; by id, which asks no metaclass for a hash
    chosen = [o for o in objects if id(type(o)) in wanted]
    return Living([o for o in chosen if type(o) is functools.partial], [o for o in chosen if type(o) is not functools.partial])


def _module_classes() -> set[type]:
    found: set[type] = set()
    todo: list[type] = [torch.nn.Module]
    while todo:
        cls = todo.pop()
        if cls not in found:
            found.add(cls)
            todo += type.__subclasses__(cls)
    return found


def _collections() -> tuple[int, ...] | None:
    """How often objects were moved to the oldest generation; None where this Python's collector may work otherwise."""
    return tuple(each["collections"] for each in gc.get_stats()[1:]) if sys.version_info < (3, 13) else None


@contextlib.contextmanager
def unfrozen() -> Iterator[bool]:
    """With the objects in sight that gc.freeze() has hidden, if any; frozen again afterwards, together with what else is alive."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        yield frozen
    finally:
        if frozen:
            gc.freeze()
