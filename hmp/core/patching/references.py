"""Follows names of torch's functions that other code took: `from torch import matmul`, a table {"tanh": torch.tanh}, an activation.

Who holds a function from before it was replaced calls torch without hmp. Searched are the globals of imported modules, the dicts, lists and
classes among them; the attributes of every nn.Module and of its class, and the dicts and lists among them; partials (transformers' FNet has
`partial(torch.fft.fftn, dim=(1, 2))`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import holders, patches

_TORCH = frozenset({"torch", "torchgen", "functorch"})
# Packages whose names are left alone, but for functions in Python that torch's modules take from each other: torch's code looks its other
# functions up at each call, and the standard library has none of them.
SKIPPED = sys.stdlib_module_names | _TORCH | {"hmp"}

_followed: set[int] = set()  # the ids of the functions whose names have been searched for


def follow() -> None:
    """Put what replaces functions (see `patches.replaces`) where names hold them, until patches.restore().

    That leaves alone what others wrote since. Names of functions that were searched for before are not searched for again.
    """
    fresh = _not_followed(patches.replacements())
    if fresh:
        if not _followed:
            patches.on_restore(_followed.clear)
        _followed.update(fresh)
        _put(fresh, _users_holders(fresh))
        _put_in(_modules_of_torch(), _in_python(fresh))


def follow_in(modules: Sequence[types.ModuleType]) -> None:
    """Follow names of functions written in Python after the import of these modules of torch's.

    In their globals, and in those of all of torch the names of functions that were replaced at that import.
    """
    functions = _in_python(patches.replacements())
    _put_in(modules, functions)
    fresh = _not_followed(functions)
    _put_in(_modules_of_torch() if fresh else (), fresh)


def give_back(taken: Sequence[Any], originals: Sequence[Any]) -> None:
    """Put each of the `originals` where names, taken while torch was patched, hold what replaced it. Call it after patches.restore().

    What is held elsewhere does what torch's function does; a PatchedOp equals it, too.
    """
    counts = list(map(sys.getrefcount, taken))
    held = {id(new): function for new, function, count in zip(taken, originals, counts, strict=True) if count > _UNREFERENCED}
    if held:
        for holder in (*_users_holders(held), *_tables(map(vars, _modules_of_torch()), _in_python(held))):
            _replace(holder, held, [])


_UNREFERENCED = next(map(sys.getrefcount, [object()]))


def _not_followed(replaced: Mapping[int, Any]) -> dict[int, Any]:
    return {number: new for number, new in replaced.items() if number not in _followed}


def _in_python(replaced: Mapping[int, Any]) -> dict[int, Any]:
    return {number: new for number, new in replaced.items() if isinstance(new, types.FunctionType)}


def _put_in(modules: Iterable[types.ModuleType], replaced: Mapping[int, Any]) -> None:
    _put(replaced, _tables(map(vars, modules), replaced))


def _put(replaced: Mapping[int, Any], searched: Iterable[Any]) -> None:
    """Put what replaces functions, by their ids, into the holders that hold them, until patches.restore()."""
    changed: list[tuple[Callable[[], Any], list[tuple[Any, Any]]]] = []

    def undo() -> None:
        for reference, put in changed:
            _replace(reference(), {id(new): before for new, before in put}, [])

    patches.on_restore(undo)
    for holder in searched:
        put: list[tuple[Any, Any]] = []
        changed.append((_reference(holder), put))  # first: an interrupt may come right after something was put
        _replace(holder, replaced, put)
        if not put:
            changed.pop()


def _replace(holder: Any, replaced: Mapping[int, Any], put: list[tuple[Any, Any]]) -> None:
    """Put what replaces values, by their ids, into the holder. Adds each to `put`, with what was there before.

    A function in a static method counts, too.
    """
    kind = holders.kind_of(holder)
    for key, value in kind.items(holder):
        if id(value) in replaced:
            put.append((replaced[id(value)], value))
        elif type(value) is staticmethod and id(value.__func__) in replaced:
            put.append((staticmethod(replaced[id(value.__func__)]), value))
        else:
            continue
        kind.put(holder, key, put[-1][0])


def _reference(holder: Any) -> Callable[[], Any]:
    """Return a function that returns the holder, or None once it is gone. It keeps only a list or a dict alive."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def _modules_of_torch() -> list[types.ModuleType]:
    found = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] in _TORCH]
    return [each for each in found if isinstance(each, types.ModuleType)]


def _users_holders(replaced: Mapping[int, Any]) -> Iterator[Any]:
    """Yield the objects that are searched, and that others than torch have made."""
    marks_of_torch = replaced.keys() | _TORCHS
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in SKIPPED or not isinstance(module, types.ModuleType):
            continue
        values = list(vars(module).values())
        if not marks_of_torch.isdisjoint(map(id, values)):  # a module that writes torch.tanh has imported torch
            yield vars(module)
            yield from _tables(values, replaced)
            for value in values:
                if issubclass(type(value), type) and value.__module__ == name:
                    yield from _class(value, replaced)
    for cls in subclasses(torch.nn.Module):
        if str(cls.__module__).partition(".")[0] not in SKIPPED:
            yield from _class(cls, replaced)
    with unfrozen():
        alive = _of_types(functools.partial, torch.nn.Module)
    for each in alive:
        attributes = [each.func] if type(each) is functools.partial else list(vars(each).values())
        if not replaced.keys().isdisjoint(map(id, attributes)):
            yield each
        yield from _tables(attributes, replaced)


# A module with none of these among its globals, nor a builtin that is patched, is not searched further.
_TORCHS = frozenset(map(id, (torch, torch.nn, torch.nn.functional, torch.special, torch.linalg, torch.fft)))


def _tables(values: Iterable[Any], replaced: Mapping[int, Any]) -> Iterator[Any]:
    """Yield the lists and dicts among `values` that hold one of the functions."""
    for value in values:
        held = value if type(value) is list else dict.values(value) if issubclass(type(value), dict) else ()
        if held and not replaced.keys().isdisjoint(map(id, list(held))):
            yield value


def _class(cls: type, replaced: Mapping[int, Any]) -> Iterator[Any]:
    values = list(vars(cls).values())
    if staticmethod in map(type, values) or not replaced.keys().isdisjoint(map(id, values)):
        yield cls
    yield from _tables(values, replaced)


# --- among all objects that are alive ------------------------------------------------------------------------------------------


def _of_types(*classes: type) -> list[Any]:
    """Return every object whose type is one of `classes` or a subclass of one. To be called while the garbage collector is paused.

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
    """Return all subclasses of `cls`, direct or not, each once."""
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
