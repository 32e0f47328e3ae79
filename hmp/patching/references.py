"""Who took a builtin of torch before it was patched has what stands in its place instead, and the builtin again on restore.

A function of torch that is written in Python needs none of this: it keeps its object (see patches). A builtin is another object while
it is patched, and whoever holds it calls torch past hmp: `from torch import matmul`, a table {"tanh": torch.tanh}, a class attribute, a
default argument, a closure, a module's `self.activation`, and the partials that models keep from their construction on: transformers'
FNet holds `partial(torch.fft.fftn, dim=(1, 2))`.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from . import heap, patches
from .stand_ins import Counterpart

Dispatchers = Mapping[int, Callable[..., Any]]

# Whose names are left alone: torch looks its own up anew, and the standard library holds none.
SKIPPED = sys.stdlib_module_names | {"torch", "torchgen", "functorch", "hmp"}


class Place(NamedTuple):
    """Where a builtin is held: `key` of `holder`, which is a list, a dict, a class, a module (its attributes), a function (its defaults),
    a partial or a cell."""

    holder: Any
    key: Any

    def held(self) -> Any:
        """What is held there now; None for nothing."""
        holder, key = self
        if isinstance(holder, types.CellType):
            return holder.cell_contents
        if isinstance(holder, functools.partial):
            return holder.func
        if isinstance(holder, types.FunctionType):
            holder = holder.__defaults__ or ()
        if isinstance(holder, (tuple, list)):
            return holder[key] if key < len(holder) else None
        return (vars(holder) if isinstance(holder, (type, torch.nn.Module)) else holder).get(key)

    def put(self, value: Any) -> None:
        """Has `value` held there."""
        holder, key = self
        if isinstance(holder, types.CellType):
            holder.cell_contents = value
        elif isinstance(holder, functools.partial):
            state: Any = holder.__reduce__()[2]
            _, arguments, keywords, attributes = state
            holder.__setstate__((value, arguments, keywords, attributes))  # type: ignore[attr-defined]
        elif isinstance(holder, types.FunctionType):
            defaults = holder.__defaults__ or ()
            holder.__defaults__ = (*defaults[:key], value, *defaults[key + 1 :])
        elif isinstance(holder, type):
            # a builtin takes no self, a function would
            setattr(holder, key, staticmethod(value) if isinstance(value, types.FunctionType) else value)
        else:
            (vars(holder) if isinstance(holder, torch.nn.Module) else holder)[key] = value


def rebind(dispatchers: Dispatchers) -> None:
    """Binds the names of originals (id → dispatcher) to the dispatchers, until patches.restore(); what is not ours by then stays.

    Reached are the globals of modules that are not torch's, and the lists, dicts, classes and functions among them; the attributes of
    every nn.Module, with the lists and dicts among them; and partials.
    """
    rebound: list[tuple[Callable[[], Any], Any, Any, Any]] = []

    def undo() -> None:
        for reference, key, dispatcher, original in rebound:
            holder = reference()
            if holder is not None and unwrapped(Place(holder, key).held()) is unwrapped(dispatcher):
                Place(holder, key).put(original)

    patches.on_restore(undo)  # first: what is bound when something fails is given back too
    for place in _places(dispatchers):
        original = place.held()
        dispatcher = dispatchers[id(unwrapped(original))]
        place.put(dispatcher)
        rebound.append((_reference(place.holder), place.key, dispatcher, original))


def _places(dispatchers: Dispatchers) -> Iterator[Place]:
    alive = heap.partials_and_modules()
    yield from (Place(partial, None) for partial in alive.partials if id(partial.func) in dispatchers)
    yield from _in_python_modules(dispatchers)
    for module in alive.modules:
        yield from _in_attributes(module, dispatchers)


def _reference(holder: Any) -> Callable[[], Any]:
    """Gives the holder while it is alive: no partial, model or class is kept alive. A list, a dict and a cell are."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def unbind(cls: type, is_dispatcher: Callable[[Any], bool]) -> None:
    """Makes the dispatchers among the attributes of a new class static methods, until patches.restore(): a builtin takes no self."""
    for name, value in list(vars(cls).items()):
        if is_dispatcher(value):
            setattr(cls, name, staticmethod(value))


def give_back(dispatchers: list[Any], counterparts: list[Any]) -> None:
    """Whoever took one of these dispatchers or counterparts, which stand nowhere any more, has torch's own function again.

    In dicts (those of modules and objects too), lists, sets, partials, classes, closures and default arguments; another tuple keeps
    its dispatcher, which does what torch's function does.
    """
    inside = {id(unwrapped(counterpart)) for counterpart in counterparts}
    held = [s for s, count in zip(dispatchers, _references(dispatchers), strict=True) if count > _UNHELD + (id(s) in inside)]
    held += [c for c, count in zip(counterparts, _references(counterparts), strict=True) if count > _UNHELD]
    _replace(held, {id(each): each.__wrapped__ for each in held}, [dispatchers, counterparts])


def replace(counterparts: dict[Any, Counterpart], besides: Iterable[Any]) -> None:
    """Whoever took one of these dispatchers has its counterpart instead, as above, but for the containers `besides`."""
    # hmp's own: the table of dispatchers, those of its function, and its counterpart; a dispatcher whose call is in progress has more
    counts = zip(_references(counterparts), counterparts.items(), strict=True)
    held = [dispatcher for count, (dispatcher, other) in counts if count > _UNHELD + 2 + (other.__func__ is dispatcher)]
    _replace(held, {id(dispatcher): counterparts[dispatcher] for dispatcher in held}, [*besides, counterparts])


def _replace(held: list[Any], others: Mapping[int, Any], besides: Iterable[Any]) -> None:
    skipped = {*map(id, besides), id(held)}
    inside: list[Any] = held
    for _ in range(3):  # a class holds a dict that holds a static method
        if not inside:
            return
        with heap.unfrozen():
            holders = gc.get_referrers(*inside)
        tuples, inside = inside, []
        for holder in holders:
            if id(holder) in skipped or holder is tuples or isinstance(holder, Counterpart):
                continue
            if isinstance(holder, (tuple, staticmethod)) or (type(holder) is dict and "__module__" in holder):
                inside.append(holder)  # perhaps a function's default arguments, or the attributes of a class
            elif isinstance(holder, types.FunctionType):
                holder.__defaults__ = tuple(others.get(id(value), value) for value in holder.__defaults__ or ()) or None
            elif isinstance(holder, type):
                for name, value in list(vars(holder).items()):
                    other = others.get(id(value), others.get(id(unwrapped(value))))
                    if other is not None:
                        is_bare = value is unwrapped(value) or isinstance(value, Counterpart)
                        setattr(holder, name, other if is_bare or isinstance(other, Counterpart) else staticmethod(other))
            elif tuples is held:
                _replace_in(holder, others)


def _references(objects: Iterable[Any]) -> list[int]:
    return list(map(sys.getrefcount, objects))


_UNHELD = _references([object()])[0]


def _replace_in(holder: Any, others: Mapping[int, Any]) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = others[id(holder.cell_contents)]
    elif type(holder) is functools.partial:
        Place(holder, None).put(others.get(id(holder.func), holder.func))
    elif isinstance(holder, list):
        holder[:] = [others.get(id(value), value) for value in holder]
    elif isinstance(holder, set):
        found = [value for value in holder if id(value) in others]
        holder.difference_update(found)
        holder.update(others[id(value)] for value in found)
    elif not isinstance(holder, (types.FrameType, type)):
        names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for key, value in list(names.items()):
            if id(value) in others:
                names[key] = others[id(value)]
            if id(key) in others:
                names[others[id(key)]] = names.pop(key)


def unwrapped(value: Any) -> Any:
    """What a static method calls; any other value as it is."""
    return value.__func__ if isinstance(value, staticmethod) else value


def _in_python_modules(dispatchers: Dispatchers) -> Iterator[Place]:
    seen: set[int] = set()
    telling = dispatchers.keys() | _TORCHS
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in SKIPPED or not isinstance(module, types.ModuleType):
            continue
        names = vars(module)
        values = list(names.values())
        if telling.isdisjoint(map(id, values)):
            continue  # who writes torch.tanh has torch
        yield from _in(names, dispatchers)
        for value in values:
            if id(value) not in seen:
                seen.add(id(value))
                yield from _inside(value, name, dispatchers)


# A module that has none of these, nor any builtin that is patched, is taken to have no table of such builtins.
_TORCHS = frozenset(map(id, (torch, torch.nn, torch.nn.functional, torch.special, torch.linalg, torch.fft)))


def _inside(value: Any, module: str, dispatchers: Dispatchers) -> Iterator[Place]:
    """The places inside a module's global."""
    kind = type(value)
    if kind is dict or kind is list:
        yield from _in(value, dispatchers)
    elif kind is types.FunctionType:
        if value.__module__ == module:
            yield from _in_function(value, dispatchers)
    elif issubclass(kind, type) and value.__module__ == module:
        for name, attribute in list(vars(value).items()):
            # a static or class method, and what hmp itself has put around a constructor
            attribute = getattr(attribute, "__dict__", {}).get("__wrapped__", unwrapped(attribute))
            if id(attribute) in dispatchers:
                yield Place(value, name)
            elif type(attribute) is types.FunctionType:
                yield from _in_function(attribute, dispatchers)
            elif type(attribute) is dict or type(attribute) is list:
                yield from _in(attribute, dispatchers)
    elif isinstance(value, dict):
        yield from _in(value, dispatchers)


def _in_function(function: types.FunctionType, dispatchers: Dispatchers) -> Iterator[Place]:
    if str(function.__globals__.get("__name__")).partition(".")[0] == "hmp":
        return  # what hmp has put there calls torch's own
    for i, value in enumerate(function.__defaults__ or ()):
        if id(value) in dispatchers:
            yield Place(function, i)
    if function.__kwdefaults__:
        yield from _in(function.__kwdefaults__, dispatchers)
    for cell in function.__closure__ or ():
        try:
            if id(cell.cell_contents) in dispatchers:
                yield Place(cell, None)
        except ValueError:  # not filled yet
            continue


def _in(container: Any, dispatchers: Dispatchers) -> Iterator[Place]:
    items = enumerate(container) if isinstance(container, list) else list(dict.items(container))
    for key, value in items:
        if id(value) in dispatchers:
            yield Place(container, key)


def _in_attributes(module: torch.nn.Module, dispatchers: Dispatchers) -> Iterator[Place]:
    attributes = vars(module)
    if not dispatchers.keys().isdisjoint(map(id, attributes.values())):
        yield from (Place(module, place.key) for place in _in(attributes, dispatchers))
    for value in list(attributes.values()):
        if (type(value) is dict or type(value) is list) and value:
            yield from _in(value, dispatchers)
