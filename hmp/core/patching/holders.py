"""What kinds of object hold references: how each is read, and how another value is put in a place of it.

The one table of those that look for functions and put others there: for torch's builtins in users' code, and for
PatchedOps in the modules that torch imports late.
"""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Items = Iterable[tuple[Any, Any]]


class Kind(NamedTuple):
    """How one kind of holder is read and written: by keys, each of which is a place in it."""

    items: Callable[[Any], Items]  # each key, with what is there now
    get: Callable[[Any, Any], Any]  # what is at a key; None for nothing
    put: Callable[[Any, Any, Any], None]
    inside: Callable[[Any], Iterable[Any]]  # the objects in it that may be holders themselves


def _put_item(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def _put_member(holder: set[Any], key: Any, value: Any) -> None:
    holder.remove(key)
    holder.add(value)


def _contents(cell: types.CellType) -> list[tuple[None, Any]]:
    try:
        return [(None, cell.cell_contents)]
    except ValueError:  # not filled
        return []


def _fill(cell: types.CellType, _: None, value: Any) -> None:
    cell.cell_contents = value


def _put_default(function: types.FunctionType, at: int, value: Any) -> None:
    defaults = function.__defaults__ or ()
    function.__defaults__ = (*defaults[:at], value, *defaults[at + 1 :])


def _put_func(partial: Any, _: None, value: Any) -> None:
    _, arguments, keywords, attributes = partial.__reduce__()[2]
    partial.__setstate__((value, arguments, keywords, attributes))


def _attributes(holder: Any) -> Any:
    return getattr(holder, "__dict__", {})


def _item(items: Any, at: int) -> Any:
    return items[at] if at < len(items) else None


def _no_items(_: Any) -> Items:
    return ()


def _no_put(holder: Any, key: Any, value: Any) -> None:
    raise TypeError(f"{type(holder).__name__} has no place that could be written")


DICT = Kind(
    lambda h: list(dict.items(h)), lambda h, key: h.get(key), _put_item, lambda h: [each for item in dict.items(h) for each in item]
)
LIST = Kind(lambda h: list(enumerate(h)), _item, _put_item, list)
CELL = Kind(_contents, lambda h, _: dict(_contents(h)).get(None), _fill, lambda h: [value for _, value in _contents(h)])
FUNCTION = Kind(  # its default arguments; the other places of a function are those of what is inside
    lambda h: list(enumerate(h.__defaults__ or ())),
    lambda h, at: _item(h.__defaults__ or (), at),
    _put_default,
    lambda h: [*(h.__closure__ or ()), *(h.__defaults__ or ()), h.__kwdefaults__, vars(h)],
)
CLASS = Kind(lambda h: list(vars(h).items()), lambda h, name: vars(h).get(name), setattr, lambda h: list(vars(h).values()))
_PARTIAL = Kind(lambda h: [(None, h.func)], lambda h, _: h.func, _put_func, lambda h: [h.func, *h.args, h.keywords])
_SET = Kind(lambda h: [(each, each) for each in h], lambda h, key: key if key in h else None, _put_member, list)
_TUPLE = Kind(_no_items, lambda h, key: None, _no_put, list)  # another one has to be put in its place
_METHOD = Kind(_no_items, lambda h, key: None, _no_put, lambda h: [h.__func__])
_VIEW = Kind(_no_items, lambda h, key: None, _no_put, lambda h: [each for item in h.items() for each in item])
OBJECT = Kind(
    lambda h: list(_attributes(h).items()),
    lambda h, name: _attributes(h).get(name),
    lambda h, name, value: _put_item(vars(h), name, value),
    lambda h: [_attributes(h)],
)
# The first row that fits is an object's kind. Asked of type(object), and by `is` and issubclass(), which call nothing of a user's class.
_SUBCLASSES_TOO: tuple[tuple[type, Kind], ...] = (
    (dict, DICT), (list, LIST), (set, _SET), (tuple, _TUPLE), (frozenset, _TUPLE), (type, CLASS),
    (staticmethod, _METHOD), (classmethod, _METHOD), (collections.deque, LIST), (types.MappingProxyType, _VIEW),
)  # fmt: skip
_THE_CLASS_ALONE = ((types.FunctionType, FUNCTION), (types.CellType, CELL), (functools.partial, _PARTIAL))


def kind_of(holder: Any) -> Kind:
    """Return the kind of any object; one that has no places of its own has its attributes."""
    cls = type(holder)
    for each, kind in _THE_CLASS_ALONE:
        if cls is each:
            return kind
    for base, kind in _SUBCLASSES_TOO:
        if issubclass(cls, base):
            return kind
    return OBJECT


class Slot(NamedTuple):
    """A place in a holder: the one at `key`."""

    holder: Any
    key: Any

    def value(self) -> Any:
        """Return the object in the slot now; None for none."""
        return kind_of(self.holder).get(self.holder, self.key)

    def put(self, value: Any) -> None:
        """Put `value` into the slot."""
        kind_of(self.holder).put(self.holder, self.key, value)


def replace(holder: Any, kind: Kind, other: Callable[[Any], Any]) -> None:
    """Put `other(value)` instead of each value in `holder`, of that kind, for which it is another object; of a dict's keys, too."""
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


def unwrapped(value: Any) -> Any:
    """Return the function of a static method; any other value itself."""
    return value.__func__ if isinstance(value, staticmethod) else value
