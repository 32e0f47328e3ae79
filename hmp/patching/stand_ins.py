"""What stands in a builtin's place: a dispatcher, or a Counterpart, an object that calls the dispatcher and equals the builtin."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any


class Counterpart(staticmethod):  # type: ignore[type-arg]
    """Calls a dispatcher, and equals and hashes as `own`, the builtin of torch's that the dispatcher stands for (R19): a dict with `own`
    as a key finds it by its counterpart, too.

    A dispatcher is a Python function, which equals only itself. Derived from staticmethod, whose call is C code: a call through a
    counterpart costs 80 ns more than one of the dispatcher.
    """

    __slots__ = ("__weakref__", "own")

    def __init__(self, dispatcher: Callable[..., Any], own: Any) -> None:
        super().__init__(dispatcher)
        self.own = own
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # staticmethod has copied the dispatcher's
            setattr(self, name, getattr(own, name, None))

    @property
    def __wrapped__(self) -> Any:
        return self.own

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Counterpart):
            other = other.own
        elif type(other) is types.FunctionType and is_dispatcher(other.__code__):
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
        # by name: it loads as what that name is bound to in the process that loads it
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
    """The counterpart of a method of torch.Tensor's: like the method, it binds to the instance when it is read as an attribute."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.__func__.__get__(instance, owner)


class ComparisonCounterpart(MethodCounterpart):
    """The counterpart of `Tensor.__eq__` and the like. Returns NotImplemented for one argument, which Python passes to compare classes."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(*args, **kwargs) if len(args) != 1 or kwargs else NotImplemented


class _Module:
    """Pickles as the module of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return importlib.import_module, (self._name,)


def is_dispatcher(code: types.CodeType) -> bool:
    """Whether `code` is that of a dispatcher."""
    return code.co_name == "hmp_dispatcher"


def stands_in(function: Any) -> bool:
    """Whether `function` is a dispatcher or a counterpart."""
    return isinstance(function, Counterpart) or (type(function) is types.FunctionType and is_dispatcher(function.__code__))


KINDS = (Counterpart, MethodCounterpart, ComparisonCounterpart)


def own(function: Any) -> Any:
    """torch's own function, for its counterpart; any other value itself."""
    return function.own if isinstance(function, Counterpart) else function


@functools.cache
def compares(name: str) -> bool:
    """Whether `name` is a special method that `type` has too, such as `__eq__`."""
    return name.startswith("__") and hasattr(type, name)
