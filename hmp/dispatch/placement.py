"""Puts a dispatcher in the place of each torch function that a policy changes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

from ..ops import Site
from ..patching import patches, references, stands_in
from ..torch_hooks import late_imports, override_tables
from ..torch_private import BUILTIN_FINDER, builtin_table, reset_dynamo
from . import dispatchers, function_protocol

_dispatchers: dict[int, Callable[..., Any]] = {}


def install(sites: Iterable[Site]) -> None:
    """Puts dispatchers at `sites` that have none, until patches.restore()."""
    if not _dispatchers:
        override_tables.answer(own)
        late_imports.install(own)
        reset_dynamo()
        find = getattr(*BUILTIN_FINDER)
        patches.swap(find, _finding_dispatchers(patches.unpatched(find)))
        patches.on_restore(_forget_dispatchers)
    fresh: dict[int, Callable[..., Any]] = {}
    bound: list[tuple[Site, Any]] = []
    for site in sites:
        original = site.original
        if isinstance(original, types.FunctionType) and hasattr(original, "__code__") and not stands_in(original):
            if not patches.swapped(original):
                patches.swap(original, dispatchers.make(original, patches.unpatched(original), None))
            continue
        if id(original) not in _dispatchers:
            _dispatchers[id(original)] = fresh[id(original)] = _named(dispatchers.make(original, original, site), site)
        dispatcher: Any = _dispatchers[id(original)]
        if not patches.rebound(site.owner, site.attribute):
            bound.append((site, dispatcher))
        if isinstance(site.owner, type) and not hasattr(original, "__get__"):
            dispatcher = staticmethod(dispatcher)  # a builtin function takes no self as an attribute of a class
        patches.rebind(site.owner, site.attribute, dispatcher)
    function_protocol.install(bound, _tables)
    bound.clear()
    if fresh:
        fresh = {key: function_protocol.for_users_names(dispatcher.__wrapped__, dispatcher) for key, dispatcher in fresh.items()}  # type: ignore[attr-defined]
        references.rebind_names(fresh)


def dispatcher_for(function: Any) -> Any:
    """The dispatcher for torch's builtin `function`, or `function` itself where it has none."""
    dispatcher: Any = _dispatchers.get(id(function))
    return dispatcher if dispatcher is not None and dispatcher.__wrapped__ is function else function


def originals() -> dict[int, Any]:
    """The builtins of torch's that have a dispatcher, by id."""
    return {id(dispatcher.__wrapped__): dispatcher.__wrapped__ for dispatcher in _dispatchers.values()}  # type: ignore[attr-defined]


# Functions of other modules, each of which returns containers of hmp's that hold dispatchers.
holders: list[Callable[[], Iterable[Any]]] = []


def _tables() -> list[Any]:
    """The containers of hmp's that hold dispatchers."""
    return [_dispatchers, *(table for give in holders for table in give())]


def in_place() -> list[Callable[..., Any]]:
    """The dispatchers of torch's builtins; each has its builtin as `__wrapped__`."""
    return list(_dispatchers.values())


def own(function: Any) -> Any:
    """torch's builtin for its dispatcher or counterpart; any other value itself."""
    return function.__wrapped__ if stands_in(function) and hasattr(function, "__wrapped__") else function


def _named(dispatcher: Callable[..., Any], site: Site) -> Callable[..., Any]:
    # pickle, and readers of tracebacks, find it under the name of torch's function
    dispatcher.__name__ = site.attribute
    qualified = f"Tensor.{site.attribute}" if site.where == "torch.Tensor" else site.attribute
    dispatcher.__qualname__ = qualified
    dispatcher.__module__ = "torch" if site.where == "torch.Tensor" else site.where
    dispatcher.__doc__ = site.original.__doc__
    dispatcher.__wrapped__ = site.original  # type: ignore[attr-defined]
    return dispatcher


def _finding_dispatchers(original: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """A `_find_builtin` of torch.jit.script's that finds the op of a dispatcher, too: scripted code runs without casts."""

    def find(function: Any) -> str | None:
        found = original(function)
        if found is None and stands_in(function):
            found = original(function.__wrapped__)
        return found

    return find


def _forget_dispatchers() -> None:
    # torch.jit.script may have filled its table while dispatchers were in place
    table = builtin_table()
    for dispatcher in _dispatchers.values():
        op = table.pop(id(dispatcher), None)
        if op is not None:
            table.setdefault(id(dispatcher.__wrapped__), op)  # type: ignore[attr-defined]
    _dispatchers.clear()
    dispatchers.forget()
    reset_dynamo()
