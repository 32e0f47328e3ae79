"""Puts a switch in the place of each torch function that a policy changes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

from ..ops import Site
from ..patching import patches, references, stands_in
from ..torch_hooks import late_imports, override_tables
from ..torch_private import BUILTIN_FINDER, builtin_table, reset_dynamo
from . import handed_out, switches

_switches: dict[int, Callable[..., Any]] = {}


def install(sites: Iterable[Site]) -> None:
    """Puts switches at `sites`; those that have one keep it."""
    if not _switches:
        override_tables.answer(own)
        late_imports.install(own)
        reset_dynamo()
        find = getattr(*BUILTIN_FINDER)
        patches.swap(find, _finding_switches(patches.plain(find)))
        patches.on_restore(_forget_switches)
    fresh: dict[int, Callable[..., Any]] = {}
    bound: list[tuple[Site, Any]] = []
    for site in sites:
        original = site.original
        if isinstance(original, types.FunctionType) and hasattr(original, "__code__") and not stands_in(original):
            if not patches.swapped(original):
                patches.swap(original, switches.make(original, patches.plain(original), None))
            continue
        if id(original) not in _switches:
            _switches[id(original)] = fresh[id(original)] = _named(switches.make(original, original, site), site)
        switch: Any = _switches[id(original)]
        if not patches.rebound(site.owner, site.attribute):
            bound.append((site, switch))
        if isinstance(site.owner, type) and not hasattr(original, "__get__"):
            switch = staticmethod(switch)  # a C function held by a class takes no self
        patches.rebind(site.owner, site.attribute, switch)
    handed_out.install(bound, _tables)
    bound.clear()
    if fresh:
        fresh = {key: handed_out.standing(switch.__wrapped__, switch) for key, switch in fresh.items()}  # type: ignore[attr-defined]
        references.rebind(fresh)


def standing(function: Any) -> Any:
    """The switch for torch's builtin `function`, or `function` itself where it has none."""
    switch: Any = _switches.get(id(function))
    return switch if switch is not None and switch.__wrapped__ is function else function


def originals() -> dict[int, Any]:
    """torch's builtins that switches stand for, by id."""
    return {id(switch.__wrapped__): switch.__wrapped__ for switch in _switches.values()}  # type: ignore[attr-defined]


# Functions of other modules, each of which gives tables of hmp's that hold switches.
holders: list[Callable[[], Iterable[Any]]] = []


def _tables() -> list[Any]:
    """The tables of hmp's that hold switches."""
    return [_switches, *(table for give in holders for table in give())]


def in_place() -> list[Callable[..., Any]]:
    """The switches that stand in the place of torch's builtins; each has the function that it stands for as `__wrapped__`."""
    return list(_switches.values())


def own(function: Any) -> Any:
    """torch's builtin where `function` is what stands in its place, else `function` itself."""
    return function.__wrapped__ if stands_in(function) and hasattr(function, "__wrapped__") else function


def _named(switch: Callable[..., Any], site: Site) -> Callable[..., Any]:
    # found by pickle and by people under the name of torch's own function
    switch.__name__ = site.attribute
    qualified = f"Tensor.{site.attribute}" if site.where == "torch.Tensor" else site.attribute
    switch.__qualname__ = qualified
    switch.__module__ = "torch" if site.where == "torch.Tensor" else site.where
    switch.__doc__ = site.original.__doc__
    switch.__wrapped__ = site.original  # type: ignore[attr-defined]
    return switch


def _finding_switches(original: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """torch.jit.script finds the op behind a switch: scripted code is compiled without casts."""

    def find(function: Any) -> str | None:
        found = original(function)
        if found is None and stands_in(function):
            found = original(function.__wrapped__)
        return found

    return find


def _forget_switches() -> None:
    # the table may have been filled while switches stood in torch's places
    table = builtin_table()
    for switch in _switches.values():
        op = table.pop(id(switch), None)
        if op is not None:
            table.setdefault(id(switch.__wrapped__), op)  # type: ignore[attr-defined]
    _switches.clear()
    switches.forget()
    reset_dynamo()
