"""Replaces torch's builtins by their dispatchers wherever users' code refers to them, and puts the builtins back on restore.

A function of torch that is written in Python stays the same object (see patches). A builtin does not: who has a reference to it from
before it was patched calls torch without hmp. Such references are `from torch import matmul`, a dict {"tanh": torch.tanh}, a class
attribute, a default argument, a closure, a module's `self.activation`, and partials: transformers' FNet has
`partial(torch.fft.fftn, dim=(1, 2))`.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from . import heap, holders, patches
from .holders import CELL, CLASS, DICT, FUNCTION, LIST, Kind, Slot, unwrapped
from .stand_ins import Counterpart

Dispatchers = Mapping[int, Callable[..., Any]]

# Packages whose names are left alone: torch's code looks its functions up at each call, and the standard library has none of them.
SKIPPED = sys.stdlib_module_names | {"torch", "torchgen", "functorch", "hmp"}


def rebind_names(dispatchers: Dispatchers) -> None:
    """Puts dispatchers into all slots that hold their builtins (`dispatchers` has them by the builtin's id), until patches.restore(), which
    leaves a slot alone that other code has written since.

    Searched are the globals of modules that are not torch's, and the lists, dicts, classes and functions among them; the attributes of
    every nn.Module, and the lists and dicts among them; and partials.
    """
    rebound: list[tuple[Callable[[], Any], Any, Any, Any]] = []

    def undo() -> None:
        for reference, key, dispatcher, original in rebound:
            holder = reference()
            if holder is not None and unwrapped(Slot(holder, key).value()) is unwrapped(dispatcher):
                Slot(holder, key).put(original)

    patches.on_restore(undo)  # first, so that what is replaced when something fails is put back too
    for slot in _slots(dispatchers):
        original = slot.value()
        dispatcher = dispatchers[id(unwrapped(original))]
        rebound.append((_reference(slot.holder), slot.key, dispatcher, original))  # first, as what is put may be interrupted
        slot.put(dispatcher)


def _slots(dispatchers: Dispatchers) -> Iterator[Slot]:
    alive = heap.partials_and_modules()
    yield from (Slot(partial, None) for partial in alive.partials if id(partial.func) in dispatchers)
    yield from _in_python_modules(dispatchers)
    for module in alive.modules:
        yield from _in_attributes(module, dispatchers)


def _reference(holder: Any) -> Callable[[], Any]:
    """A function that returns the holder, or None once it is gone. It keeps only a list, a dict or a cell alive."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


class _MadeStatic(staticmethod):  # type: ignore[type-arg]
    """A static method where the class's code has none: restore_names() puts the builtin alone there."""


def make_static(cls: type, is_dispatcher: Callable[[Any], bool]) -> None:
    """Makes the dispatchers among the attributes of a new class static methods: like the builtins, they are to take no self."""
    for name, value in list(vars(cls).items()):
        if is_dispatcher(value):
            setattr(cls, name, _MadeStatic(value))


def restore_names(dispatchers: list[Any], counterparts: list[Any]) -> None:
    """Puts torch's own functions back wherever users' code refers to these dispatchers or counterparts, after patches.restore().

    In dicts (those of modules and objects too), lists, sets, partials, classes, closures and default arguments. A dispatcher in another
    tuple stays, and does what torch's function does.
    """
    inside = {id(unwrapped(counterpart)) for counterpart in counterparts}
    referenced = [s for s, count in zip(dispatchers, _references(dispatchers), strict=True) if count > _UNREFERENCED + (id(s) in inside)]
    referenced += [c for c, count in zip(counterparts, _references(counterparts), strict=True) if count > _UNREFERENCED]
    _replace(referenced, {id(each): each.__wrapped__ for each in referenced}, [dispatchers, counterparts])


def use_counterparts(counterparts: dict[Any, Counterpart], besides: Iterable[Any]) -> None:
    """Puts the counterparts of these dispatchers wherever users' code refers to those, as above; not in the containers `besides`."""
    # hmp's own references: the dict of dispatchers, the list of its function's, and its counterpart; a call in progress adds some
    counts = zip(_references(counterparts), counterparts.items(), strict=True)
    referenced = [dispatcher for count, (dispatcher, other) in counts if count > _UNREFERENCED + 2 + (other.__func__ is dispatcher)]
    _replace(referenced, {id(dispatcher): counterparts[dispatcher] for dispatcher in referenced}, [*besides, counterparts])


def _replace(referenced: list[Any], others: Mapping[int, Any], besides: Iterable[Any]) -> None:
    def other(value: Any) -> Any:
        if id(value) in others or not isinstance(value, staticmethod):
            return others.get(id(value), value)
        found = others.get(id(value.__func__))
        if found is None:
            return value
        return found if isinstance(value, _MadeStatic) or isinstance(found, Counterpart) else staticmethod(found)

    skipped = {*map(id, besides), id(referenced)}
    inside: list[Any] = referenced
    for _ in range(3):  # a class holds a dict that holds a static method
        if not inside:
            return
        with heap.unfrozen():
            found = gc.get_referrers(*inside)
        tuples, inside = inside, []
        for holder in found:
            if id(holder) in skipped or holder is tuples or isinstance(holder, Counterpart):
                continue
            if isinstance(holder, (tuple, staticmethod)) or (type(holder) is dict and "__module__" in holder):
                inside.append(holder)  # perhaps a function's default arguments, or the attributes of a class
            elif tuples is referenced or isinstance(holder, (types.FunctionType, type)):
                holders.replace(holder, holders.kind_of(holder), other)


def _references(objects: Iterable[Any]) -> list[int]:
    return list(map(sys.getrefcount, objects))


_UNREFERENCED = _references([object()])[0]


def _in_python_modules(dispatchers: Dispatchers) -> Iterator[Slot]:
    seen: set[int] = set()
    marks_of_torch = dispatchers.keys() | _TORCHS
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in SKIPPED or not isinstance(module, types.ModuleType):
            continue
        names = vars(module)
        values = list(names.values())
        if marks_of_torch.isdisjoint(map(id, values)):
            continue  # a module that writes torch.tanh has imported torch
        yield from _in(DICT, names, dispatchers)
        for value in values:
            if id(value) not in seen:
                seen.add(id(value))
                yield from _inside(value, name, dispatchers)


# A module with none of these among its globals, nor a builtin that is patched, is not searched further.
_TORCHS = frozenset(map(id, (torch, torch.nn, torch.nn.functional, torch.special, torch.linalg, torch.fft)))


def _inside(value: Any, module: str, dispatchers: Dispatchers) -> Iterator[Slot]:
    """The slots inside the value of a module's global."""
    kind = type(value)
    if kind is dict or kind is list:
        yield from _in(DICT if kind is dict else LIST, value, dispatchers)
    elif kind is types.FunctionType:
        if value.__module__ == module:
            yield from _in_function(value, dispatchers)
    elif issubclass(kind, type) and value.__module__ == module:
        for name, attribute in CLASS.items(value):
            yield from _in_attribute(Slot(value, name), attribute, dispatchers)
    elif isinstance(value, dict):
        yield from _in(DICT, value, dispatchers)


def _in_attribute(slot: Slot, attribute: Any, dispatchers: Dispatchers) -> Iterator[Slot]:
    """The slot of a class's attribute, or those inside what is there."""
    kind = type(attribute)
    if kind is dict or kind is list:
        yield from _in(DICT if kind is dict else LIST, attribute, dispatchers)
        return
    function = unwrapped(attribute)
    if id(function) in dispatchers:
        yield slot
        return
    # what a class method, a decorator or hmp's own InitWithoutCasts calls, too: it has the default arguments
    for each in (function, getattr(attribute, "__dict__", {}).get("__wrapped__")):
        if type(each) is types.FunctionType:
            yield from _in_function(each, dispatchers)


def _in_function(function: types.FunctionType, dispatchers: Dispatchers) -> Iterator[Slot]:
    if str(function.__globals__.get("__name__")).partition(".")[0] == "hmp":
        return  # hmp's own functions are to call torch's builtins
    if function.__defaults__:
        yield from _in(FUNCTION, function, dispatchers)
    if function.__kwdefaults__:
        yield from _in(DICT, function.__kwdefaults__, dispatchers)
    for cell in function.__closure__ or ():
        yield from _in(CELL, cell, dispatchers)


def _in(kind: Kind, holder: Any, dispatchers: Dispatchers) -> Iterator[Slot]:
    for key, value in kind.items(holder):
        if id(value) in dispatchers:
            yield Slot(holder, key)


def _in_attributes(module: torch.nn.Module, dispatchers: Dispatchers) -> Iterator[Slot]:
    attributes = vars(module)
    if not dispatchers.keys().isdisjoint(map(id, attributes.values())):
        yield from (Slot(module, slot.key) for slot in _in(DICT, attributes, dispatchers))
    for value in list(attributes.values()):
        if (type(value) is dict or type(value) is list) and value:
            yield from _in(DICT if type(value) is dict else LIST, value, dispatchers)
