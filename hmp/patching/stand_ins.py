"""What equals torch's own function, hashes as it does, and casts when it is called."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any


class Counterpart(staticmethod):  # type: ignore[type-arg]
    """Stands for `own`, a builtin of torch, where it is looked at and not only called: a table that has the one knows the other.

    A plain function cannot equal anything else. A call of it passes through C alone on its way to the switch, for which Python's
    static method has the means; such a call costs 80 ns more than the switch's.
    """

    __slots__ = ("__weakref__", "own")

    def __init__(self, switch: Callable[..., Any], own: Any) -> None:
        super().__init__(switch)
        self.own = own
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # Python has those of the switch here
            setattr(self, name, getattr(own, name, None))

    @property
    def __wrapped__(self) -> Any:
        return self.own

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Counterpart):
            other = other.own
        elif type(other) is types.FunctionType and is_switch(other.__code__):
            other = getattr(other, "__wrapped__", other)
        return bool(self.own == other)

    def __hash__(self) -> int:
        return hash(self.own)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self  # a builtin takes no self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __repr__(self) -> str:
        return repr(self.own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # what has its name where it is loaded
        *owners, name = self.__func__.__qualname__.split(".")
        owner: Any = _Module(self.__func__.__module__)
        for each in owners:
            owner = getattr(sys.modules[self.__func__.__module__], each)
        return getattr, (owner, name)

    def __copy__(self) -> Counterpart:
        return self

    def __deepcopy__(self, memo: Any) -> Counterpart:
        return self


class MethodCounterpart(Counterpart):
    """Stands for a method of torch.Tensor's: bound to a tensor where a class has it as an attribute."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.__func__.__get__(instance, owner)


class ComparisonCounterpart(MethodCounterpart):
    """Stands for `Tensor.__eq__` and the like, which a metaclass of a tensor class has too: there it compares classes."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(*args, **kwargs) if len(args) != 1 or kwargs else NotImplemented


class _Module:
    """Is the module of that name in a pickle."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return importlib.import_module, (self._name,)


def is_switch(code: types.CodeType) -> bool:
    """Whether it is code of a function that stands in the place of one of torch's."""
    return code.co_name == "hmp_switch"


def stands_in(function: Any) -> bool:
    """Whether `function` is one that stands in the place of a builtin."""
    return isinstance(function, Counterpart) or (type(function) is types.FunctionType and is_switch(function.__code__))


KINDS = (Counterpart, MethodCounterpart, ComparisonCounterpart)


def own(function: Any) -> Any:
    """torch's own function, for its counterpart; anything else as it is."""
    return function.own if isinstance(function, Counterpart) else function


@functools.cache
def compares(name: str) -> bool:
    """Whether every class answers to `name`, which a comparison calls."""
    return name.startswith("__") and hasattr(type, name)
