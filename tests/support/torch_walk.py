"""Finds what torch holds of hmp's, in two ways: down from torch's modules, and up from everything that is alive."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

ROOTS = ("torch", "torchgen", "functorch")
_CACHE: type = type(functools.lru_cache(lambda: None))
# What shows its contents to the collector: the entries of a cache too.
_OPEN = (list, tuple, set, frozenset, types.CellType, types.MethodType, staticmethod, classmethod, property, functools.partial, _CACHE)
Found = tuple[str, Any, Any]


def held_by_torch(is_wanted: Callable[[Any], bool]) -> Iterator[Found]:
    """What is wanted among all that torch's modules lead to: the way to it, what holds it, and itself."""
    return _walk(ROOTS, is_wanted)


def held_by_anything(is_wanted: Callable[[Any], bool], ours: str) -> Iterator[Found]:
    """What is wanted and held by any object that is alive, and that the modules of `ours` do not lead to."""
    own = {id(holder) for _, holder, _ in _walk((ours,), lambda value: False, lambda value: True)}
    objects = gc.get_objects()
    for holder in objects:
        if holder is objects or id(holder) in own or isinstance(holder, (types.FrameType, types.GeneratorType)):
            continue
        for value in gc.get_referents(holder):
            if is_wanted(value):
                yield type(holder).__name__, holder, value


def _walk(
    roots: tuple[str, ...], is_wanted: Callable[[Any], bool], is_told: Callable[[Any], bool] = lambda value: False
) -> Iterator[Found]:
    seen: set[int] = set()
    modules = [(n, m) for n, m in list(sys.modules.items()) if n.partition(".")[0] in roots and isinstance(m, types.ModuleType)]
    todo: list[Found] = [(f"{n}.{k}", vars(m), v) for n, m in modules for k, v in list(vars(m).items())]
    for _, module in modules:
        seen.add(id(vars(module)))
        if is_told(module):
            yield "", vars(module), None
    while todo:
        where, holder, value = todo.pop()
        if is_wanted(value):
            yield where, holder, value
        elif id(value) not in seen:
            seen.add(id(value))
            if is_told(value):
                yield where, value, None
            todo += ((where + step, value, each) for step, each in _inside(value, roots))


def _inside(value: Any, roots: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, dict):
        for key, each in list(dict.items(value)):
            name = key if isinstance(key, str) else getattr(key, "__name__", type(key).__name__)
            yield from ((f"[{name}]", each), (f"[key {name}]", key))
    elif issubclass(kind, type):
        if _root(value.__module__) in roots:
            # hmp notes on each class what it has replaced there
            yield from ((f".{key}", each) for key, each in list(vars(value).items()) if key != "__hmp_patches__")
    elif kind is types.FunctionType:
        if _root(value.__module__) in roots:
            yield from ((f"(default {i})", each) for i, each in enumerate(value.__defaults__ or ()))
            yield from ((f"(closure {n})", c) for n, c in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False))
            yield from ((f"(default {k})", v) for k, v in (value.__kwdefaults__ or {}).items())
            yield from ((f".{k}", v) for k, v in vars(value).items())
    elif issubclass(kind, _OPEN):
        yield from ((f"<{kind.__name__}>", each) for each in gc.get_referents(value))
    elif _root(kind.__module__) in (*roots, "collections", "weakref"):
        yield from ((f"<{kind.__name__}>", each) for each in gc.get_referents(value) if not isinstance(each, types.ModuleType))


def _root(module: Any) -> str:
    return str(module).partition(".")[0]
