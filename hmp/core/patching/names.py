"""Follows names that other code took of torch's functions before these were replaced: `from torch import matmul`, a model's activation.

Searched are the globals of imported modules, the attributes of their classes, and those of every nn.Module and of its class. A function
that is held elsewhere (in a table, a partial, a closure, a default argument), or by a module that gc.freeze() hid, stays torch's own;
hmp.unreachable() lists the first kind.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from . import patches

_TORCH = frozenset({"torch", "torchgen", "functorch"})
# Packages whose names are left alone, but for functions in Python that torch's modules take from each other: torch's code looks its other
# functions up at each call, and the standard library has none of them.
SKIPPED = sys.stdlib_module_names | _TORCH | {"hmp"}

_replaced: set[int] = set()  # the ids of the functions whose names have been searched for


def replace_references() -> None:
    """Put what replaces functions (see `patches.replaces`) where names hold them, until patches.restore().

    Names of functions that were searched for before are not searched for again.
    """
    fresh = {number: new for number, new in patches.replacements().items() if number not in _replaced}
    if fresh:
        if not _replaced:
            patches.on_restore(_restore_references)
        _replaced.update(fresh)
        _replace(fresh)


def _restore_references() -> None:
    """Put the functions back, also where names were taken while torch was patched."""
    _replace(patches.originals())
    _replaced.clear()


def restore_in(module: types.ModuleType) -> None:
    """Put torch's builtins back in a module of torch's that was imported while torch was patched."""
    others = {number: function for number, function in patches.originals().items() if not isinstance(function, types.FunctionType)}
    for owner in (module, *_classes_of(module)):
        _replace_in(owner, others)


def _replace(others: Mapping[int, Any]) -> None:
    """Put `others[id(value)]` instead of each value that names hold, where there is one."""
    in_python = {number: each for number, each in others.items() if isinstance(each, types.FunctionType)}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if not isinstance(module, types.ModuleType):
            continue
        if package in _TORCH:
            _replace_in(module, in_python)
        elif package not in SKIPPED:
            _replace_in(module, others)
            for cls in _classes_of(module):
                _replace_in(cls, others)
    for cls in subclasses(torch.nn.Module):
        if str(cls.__module__).partition(".")[0] not in SKIPPED:
            _replace_in(cls, others)
    for each in instances(torch.nn.Module):
        _replace_in(each, others)


def _replace_in(owner: Any, others: Mapping[int, Any]) -> None:
    """Replace the attributes that a module, a class or an object has itself. A function in a static method counts, too."""
    for name, value in list(vars(owner).items()):
        is_static = type(value) is staticmethod
        found = others.get(id(value.__func__ if is_static else value))
        if found is None or patches.rebound(owner, name):  # what is rebound patches.restore() restores
            continue
        new = staticmethod(found) if is_static else found
        if isinstance(owner, type):
            type.__setattr__(owner, name, new)
        else:
            vars(owner)[name] = new


def _classes_of(module: types.ModuleType) -> list[type]:
    # issubclass(): isinstance() would run an object's code
    return [each for each in list(vars(module).values()) if issubclass(type(each), type) and each.__module__ == module.__name__]


def instances(cls: type) -> list[Any]:
    """Return every object of `cls` that is alive.

    gc.get_objects() returns tuples too that another thread is still building, and CPython raises SystemError in that thread if a second
    reference to such a tuple exists. So the list is made, iterated over and freed inside one call of C code, in which no other thread runs.
    The test is `issubclass(type(object), cls)`: isinstance() would ask a proxy for its `__class__`, and a look-up in a set would call
    `__hash__` of metaclasses.
    """
    shared: dict[None, list[Any]] = {}  # passes the list from one iterator to the other
    objects = itertools.chain.from_iterable(map(shared.setdefault, (None,), map(gc.get_objects, (None,))))
    kinds = map(type, itertools.chain.from_iterable(map(shared.pop, (None,))))
    # one more item in `objects`, so that `kinds` ends first and frees the list
    return list(itertools.compress(itertools.chain(objects, (None,)), map(issubclass, kinds, itertools.repeat(cls))))


def subclasses(cls: type) -> list[type]:
    """Return all subclasses of `cls`, direct or not, each once."""
    found: dict[int, type] = {}  # by id: a metaclass may define no hash
    todo = [cls]
    while todo:
        below: list[type] = type.__subclasses__(todo.pop())
        fresh = {id(each): each for each in below if id(each) not in found}
        found |= fresh
        todo += fresh.values()
    return list(found.values())
