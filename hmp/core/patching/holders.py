"""What kinds of object hold functions: where each holds one, how another is put there, and what is inside.

For those that look for functions and put others there: for torch's in users' code (`references`), for PatchedOps in the modules that torch
imports late.
"""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """How one kind of holder is read and written: by keys, each of which is a place in it."""

    items: Callable[[Any], Iterable[tuple[Any, Any]]]  # each key, with what is there now
    put: Callable[[Any, Any, Any], None]


def _put_member(holder: set[Any], key: Any, value: Any) -> None:
    holder.remove(key)
    holder.add(value)


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled
        return []


def _fill(cell: types.CellType, _: int, value: Any) -> None:
    cell.cell_contents = value


def _put_func(partial: Any, _: str, value: Any) -> None:
    _, arguments, keywords, attributes = partial.__reduce__()[2]
    partial.__setstate__((value, arguments, keywords, attributes))


DICT = Kind(lambda h: list(dict.items(h)), operator.setitem)
LIST = Kind(lambda h: list(enumerate(h)), operator.setitem)
CELL = Kind(lambda h: list(enumerate(_contents(h))), _fill)
FUNCTION = Kind(lambda h: (), operator.setitem)  # its default arguments stay
CLASS = Kind(lambda h: list(vars(h).items()), setattr)
PARTIAL = Kind(lambda h: [("func", h.func)], _put_func)
SET = Kind(lambda h: [(each, each) for each in h], _put_member)
UNWRITTEN = Kind(lambda h: (), operator.setitem)  # such a holder is replaced as a whole
OBJECT = Kind(lambda h: list(getattr(h, "__dict__", {}).items()), lambda h, name, value: vars(h).update({name: value}))
# The first row that fits is an object's kind. Asked of type(object), and by `is` and issubclass(), which call nothing of a user's class.
_THE_CLASS_ALONE = ((types.FunctionType, FUNCTION), (types.CellType, CELL), (functools.partial, PARTIAL))
_SUBCLASSES_TOO: tuple[tuple[type, Kind], ...] = (
    (dict, DICT), (list, LIST), (set, SET), (tuple, UNWRITTEN), (frozenset, UNWRITTEN), (type, CLASS),
    (staticmethod, UNWRITTEN), (classmethod, UNWRITTEN), (collections.deque, LIST), (types.MappingProxyType, UNWRITTEN),
)  # fmt: skip


def kind_of(holder: Any) -> Kind:
    """Return the kind of any object; one that has no places of its own has its attributes."""
    cls = type(holder)
    found = next((kind for each, kind in _THE_CLASS_ALONE if cls is each), None)
    return found or next((kind for base, kind in _SUBCLASSES_TOO if issubclass(cls, base)), OBJECT)


def inside(holder: Any) -> list[Any]:
    """Return the objects in the holder, which may be holders themselves; not a function's globals."""
    kind, cls = kind_of(holder), type(holder)
    if kind is FUNCTION:
        return [*(holder.__closure__ or ()), *(holder.__defaults__ or ()), holder.__kwdefaults__, vars(holder)]
    if kind is PARTIAL:
        return [holder.func, *holder.args, holder.keywords]
    if issubclass(cls, (staticmethod, classmethod)):
        return [holder.__func__]
    if cls is types.MethodType:
        return [holder.__func__, holder.__self__]
    if kind is OBJECT:
        return [getattr(holder, "__dict__", {})]
    if kind is UNWRITTEN and cls is not types.MappingProxyType:
        return list(holder)
    found = kind.items(holder) if cls is not types.MappingProxyType else holder.items()
    return [each for item in found for each in item]  # keys, too


def replace(holder: Any, other: Callable[[Any], Any]) -> None:
    """Put `other(value)` instead of each value in `holder` for which it is another object; of a dict's keys, too."""
    kind = kind_of(holder)
    for key, value in kind.items(holder):
        new = other(value)
        if new is not value:
            kind.put(holder, key, new)
    if kind is DICT:
        _replace_keys(holder, other)


def _replace_keys(holder: dict[Any, Any], other: Callable[[Any], Any]) -> None:
    ordered: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
    keys = list(ordered.keys(holder))
    new = list(map(other, keys))
    if not all(map(operator.is_, keys, new)):
        for old, key in zip(keys, new, strict=True):  # all of them, so that the order is as it was; no two are missing at once
            holder[key] = holder.pop(old)
