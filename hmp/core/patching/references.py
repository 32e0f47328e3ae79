"""Follows names of torch's functions that other code took.

`from torch import matmul`, a dict {"tanh": torch.tanh}, a class attribute, a default argument, a module's `self.activation`, a partial
(transformers' FNet has `partial(torch.fft.fftn, dim=(1, 2))`).

Who holds a function from before it was replaced calls torch without hmp.
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
from typing import Any, NamedTuple

import torch

from . import patches
from .holders import CELL, CLASS, DICT, FUNCTION, LIST, Kind, Slot, unwrapped

_TORCH = frozenset({"torch", "torchgen", "functorch"})
# Packages whose names are left alone, but for functions in Python that torch's modules take from each other: torch's code looks its other
# functions up at each call, and the standard library has none of them.
SKIPPED = sys.stdlib_module_names | _TORCH | {"hmp"}

_followed: set[int] = set()  # the ids of the functions whose names have been searched for


def follow() -> None:
    """Put what replaces functions (see `patches.replaces`) where names hold them, until patches.restore().

    That leaves alone what others wrote since. Names of functions that were searched for before are not searched for again.

    Searched are the globals of modules that are not torch's, and the lists, dicts, classes and functions among them; the attributes of
    every nn.Module, and the lists and dicts among them; partials; and for functions written in Python the globals of torch's modules.
    """
    fresh = _not_followed(patches.replacements())
    if fresh:
        if not _followed:
            patches.on_restore(_followed.clear)
        _followed.update(fresh)
        _put(fresh, _slots(fresh))


def follow_in(modules: Sequence[types.ModuleType]) -> None:
    """Follow names of functions written in Python after the import of these modules of torch's.

    In their globals, and in those of all of torch the names of functions that were replaced at that import.
    """
    functions = _in_python(patches.replacements())
    fresh = _not_followed(functions)
    _put(functions, itertools.chain(_in_globals(modules, functions), _in_globals(_modules_of_torch(), fresh) if fresh else ()))


def _not_followed(replaced: Mapping[int, Any]) -> dict[int, Any]:
    return {number: new for number, new in replaced.items() if number not in _followed}


def _put(replaced: Mapping[int, Any], slots: Iterable[Slot]) -> None:
    patched: list[tuple[Callable[[], Any], Any, Any, Any]] = []

    def undo() -> None:
        for reference, key, new, before in patched:
            holder = reference()
            if holder is not None and unwrapped(Slot(holder, key).value()) is unwrapped(new):
                Slot(holder, key).put(before)

    patches.on_restore(undo)  # first, so that what is replaced when something fails is put back too
    for slot in slots:
        before = slot.value()
        new = _like(before, replaced[id(unwrapped(before))])
        patched.append((_reference(slot.holder), slot.key, new, before))  # first, as what is put may be interrupted
        slot.put(new)


def give_back(taken: Sequence[Any], originals: Sequence[Any]) -> None:
    """Put each of the `originals` where names, taken while torch was patched, hold what replaced it. Call it after patches.restore().

    What is held elsewhere does what torch's function does; a PatchedOp equals it, too.
    """
    counts = list(map(sys.getrefcount, taken))
    held = {id(new): function for new, function, count in zip(taken, originals, counts, strict=True) if count > _UNREFERENCED}
    for slot in _slots(held) if held else ():
        value = slot.value()
        slot.put(_like(value, held[id(unwrapped(value))]))


def _like(value: Any, function: Any) -> Any:
    return staticmethod(function) if isinstance(value, staticmethod) else function


_UNREFERENCED = next(map(sys.getrefcount, [object()]))


def _in_python(replaced: Mapping[int, Any]) -> dict[int, Any]:
    return {number: new for number, new in replaced.items() if isinstance(new, types.FunctionType)}


def _slots(replaced: Mapping[int, Any]) -> Iterator[Slot]:
    yield from _in_globals(_modules_of_torch(), _in_python(replaced))
    alive = partials_and_modules()
    yield from (Slot(partial, None) for partial in alive.partials if id(partial.func) in replaced)
    yield from _in_python_modules(replaced)
    for cls in subclasses(torch.nn.Module):
        if str(cls.__module__).partition(".")[0] not in SKIPPED:
            for name, attribute in CLASS.items(cls):
                yield from _in_attribute(Slot(cls, name), attribute, replaced)
    for module in alive.modules:
        yield from _in_attributes(module, replaced)


def _modules_of_torch() -> list[types.ModuleType]:
    found = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] in _TORCH]
    return [each for each in found if isinstance(each, types.ModuleType)]


def _in_globals(modules: Sequence[types.ModuleType], replaced: Mapping[int, Any]) -> Iterator[Slot]:
    for module in modules:
        names = vars(module)
        if not replaced.keys().isdisjoint(map(id, list(names.values()))):
            yield from _in(DICT, names, replaced)


def _reference(holder: Any) -> Callable[[], Any]:
    """Return a function that returns the holder, or None once it is gone. It keeps only a list, a dict or a cell alive."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def _in_python_modules(replaced: Mapping[int, Any]) -> Iterator[Slot]:
    seen: set[int] = set()
    marks_of_torch = replaced.keys() | _TORCHS
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in SKIPPED or not isinstance(module, types.ModuleType):
            continue
        names = vars(module)
        values = list(names.values())
        if marks_of_torch.isdisjoint(map(id, values)):
            continue  # a module that writes torch.tanh has imported torch
        yield from _in(DICT, names, replaced)
        for value in values:
            if id(value) not in seen:
                seen.add(id(value))
                yield from _inside(value, name, replaced)


# A module with none of these among its globals, nor a builtin that is patched, is not searched further.
_TORCHS = frozenset(map(id, (torch, torch.nn, torch.nn.functional, torch.special, torch.linalg, torch.fft)))


def _inside(value: Any, module: str, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    """Yield the slots inside the value of a module's global."""
    kind = type(value)
    if kind is dict or kind is list:
        yield from _in(DICT if kind is dict else LIST, value, replaced)
    elif kind is types.FunctionType:
        if value.__module__ == module:
            yield from _in_function(value, replaced)
    elif issubclass(kind, type) and value.__module__ == module:
        for name, attribute in CLASS.items(value):
            yield from _in_attribute(Slot(value, name), attribute, replaced)
    elif isinstance(value, dict):
        yield from _in(DICT, value, replaced)


def _in_attribute(slot: Slot, attribute: Any, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    """Yield the slot of a class's attribute, or those inside what is there."""
    kind = type(attribute)
    if kind is dict or kind is list:
        yield from _in(DICT if kind is dict else LIST, attribute, replaced)
        return
    function = unwrapped(attribute)
    if id(function) in replaced:
        yield slot
        return
    # what a class method, a decorator or hmp's own InitWithoutCasts calls, too: it has the default arguments
    for each in (function, getattr(attribute, "__dict__", {}).get("__wrapped__")):
        if type(each) is types.FunctionType:
            yield from _in_function(each, replaced)


def _in_function(function: types.FunctionType, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    if str(function.__globals__.get("__name__")).partition(".")[0] == "hmp":
        return  # hmp's own functions are to call torch's builtins
    if function.__defaults__:
        yield from _in(FUNCTION, function, replaced)
    if function.__kwdefaults__:
        yield from _in(DICT, function.__kwdefaults__, replaced)
    for cell in function.__closure__ or ():
        yield from _in(CELL, cell, replaced)


def _in(kind: Kind, holder: Any, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    for key, value in kind.items(holder):
        if id(value) in replaced:
            yield Slot(holder, key)


def _in_attributes(module: torch.nn.Module, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    attributes = vars(module)
    if not replaced.keys().isdisjoint(map(id, attributes.values())):
        yield from (Slot(module, slot.key) for slot in _in(DICT, attributes, replaced))
    for value in list(attributes.values()):
        if (type(value) is dict or type(value) is list) and value:
            yield from _in(DICT if type(value) is dict else LIST, value, replaced)


# --- among all objects that are alive ------------------------------------------------------------------------------------------


def alone() -> bool:
    """Return True if no other thread runs Python code."""
    return len(sys._current_frames()) == 1


class PartialsAndModules(NamedTuple):
    """Every `functools.partial` and every `nn.Module` alive."""

    partials: list[functools.partial[Any]]
    modules: list[torch.nn.Module]


def partials_and_modules() -> PartialsAndModules:
    """Return those that are alive now. To be called while the garbage collector is paused, as convert() does."""
    with unfrozen():
        found = _of_types(functools.partial, torch.nn.Module)
    return PartialsAndModules(
        [o for o in found if type(o) is functools.partial], [o for o in found if issubclass(type(o), torch.nn.Module)]
    )


def _of_types(*classes: type) -> list[Any]:
    """Return every object whose type is one of `classes` or a subclass of one.

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
