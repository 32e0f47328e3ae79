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


class HolderKind(NamedTuple):
    """How one kind of holder is read and written: by keys, each of which is a place in it."""

    items: Callable[[Any], Iterable[tuple[Any, Any]]]  # each key, with what is there now
    put: Callable[[Any, Any, Any], None]
    inside: Callable[[Any], list[Any]]  # what it holds, in other places too


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


def _put_default(function: types.FunctionType, at: int, value: Any) -> None:
    defaults = function.__defaults__ or ()
    function.__defaults__ = (*defaults[:at], value, *defaults[at + 1 :])


def _put_func(partial: Any, _: str, value: Any) -> None:
    _, arguments, keywords, attributes = partial.__reduce__()[2]
    partial.__setstate__((value, arguments, keywords, attributes))


def _flat(items: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [each for item in items for each in item]


def _in_object(holder: Any) -> list[Any]:
    return [holder.__func__, holder.__self__] if type(holder) is types.MethodType else [getattr(holder, "__dict__", {})]


def _unwritten(inside: Callable[[Any], list[Any]]) -> HolderKind:
    """Return the kind of a holder without places that could be written: another one has to replace it."""
    return HolderKind(lambda h: (), operator.setitem, inside)


DICT = HolderKind(lambda h: list(dict.items(h)), operator.setitem, lambda h: _flat(dict.items(h)))
LIST = HolderKind(lambda h: list(enumerate(h)), operator.setitem, list)
CELL = HolderKind(lambda h: list(enumerate(_contents(h))), _fill, _contents)
FUNCTION = HolderKind(  # its default arguments; the other places of a function are those of what is inside
    lambda h: list(enumerate(h.__defaults__ or ())),
    _put_default,
    lambda h: [*(h.__closure__ or ()), *(h.__defaults__ or ()), h.__kwdefaults__, vars(h)],
)
CLASS = HolderKind(lambda h: list(vars(h).items()), setattr, lambda h: list(vars(h).values()))
PARTIAL = HolderKind(lambda h: [("func", h.func)], _put_func, lambda h: [h.func, *h.args, h.keywords])
SET = HolderKind(lambda h: [(each, each) for each in h], _put_member, list)
TUPLE, METHOD, VIEW = _unwritten(list), _unwritten(lambda h: [h.__func__]), _unwritten(lambda h: _flat(h.items()))
OBJECT = HolderKind(
    lambda h: list(getattr(h, "__dict__", {}).items()), lambda h, name, value: vars(h).update({name: value}), _in_object
)  # fmt: skip
# The kinds of these classes and of their subclasses: the first row that fits, asked by issubclass(), which calls nothing of a user's class.
_SUBCLASSES_TOO: tuple[tuple[type, HolderKind], ...] = (
    (dict, DICT), (list, LIST), (set, SET), (tuple, TUPLE), (frozenset, TUPLE), (type, CLASS),
    (staticmethod, METHOD), (classmethod, METHOD), (collections.deque, LIST), (types.MappingProxyType, VIEW),
)  # fmt: skip
# And of these classes themselves, which are nearly all.
_BY_CLASS = {**dict(_SUBCLASSES_TOO), types.FunctionType: FUNCTION, types.CellType: CELL, functools.partial: PARTIAL}


def kind_of(holder: Any) -> HolderKind:
    """Return the kind of any object; one that has no places of its own has its attributes."""
    cls = type(holder)
    found = _BY_CLASS.get(cls) if type(cls) is type else None  # a metaclass of the user's may have its own hash
    return found or next((kind for base, kind in _SUBCLASSES_TOO if issubclass(cls, base)), OBJECT)


def inside(holder: Any) -> list[Any]:
    """Return the objects in the holder, which may be holders themselves; not a function's globals."""
    return kind_of(holder).inside(holder)


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
