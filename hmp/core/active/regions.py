"""The context managers and decorators that `hmp.casts()`, `disable_casts()` and `enable_casts()` return."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ...errors import HmpError
from .. import torch_private
from .autocast import suspended
from .state import EnteredRegion, Off, PolicyTable, Running, active_state, current_state, entered_here, get, is_traced_unpatched, put

P = ParamSpec("P")
R = TypeVar("R")


class Region:
    """A context manager and decorator: inside it `choose(state)` is active in this thread or task, with the `state` around it.

    It decorates functions, generators, coroutines, class methods and static methods. It nests, and can be entered again. At its end, also
    by an exception, the state around it is active again.

    Args:
        name: The call that made it, for messages.
        choose: Returns the state inside for the state around.
        brings_casts: True if it activates a policy: contexts of torch.autocast around it are then off inside, and copies of casts last as
            long as it.
    """

    def __init__(self, name: str, choose: Callable[[PolicyTable | Off], PolicyTable | Off], brings_casts: bool = False) -> None:
        self._name = name
        self._choose = choose
        self.brings_casts = brings_casts
        self._entered: list[EnteredRegion] = []  # and not left, in any context

    def __repr__(self) -> str:
        return f"hmp.{self._name}"

    def __enter__(self) -> Region:
        entered = EnteredRegion(self._choose(current_state()), self)
        if self.brings_casts:
            entered.during = [Running(is_call=False), *suspended()]
        entered.begin()
        self._entered.append(entered)
        return self

    def __exit__(self, *exc_info: object) -> None:
        ended = next((entered for entered in entered_here() if entered in self._entered), None)
        if ended is None and len(self._entered) == 1:  # a generator that is suspended in it may be closed in another context
            ended = self._entered[-1]
        if ended is not None:
            self._entered.remove(ended)
            ended.end()

    def _once(self) -> Region:
        """Return a copy for one `with`, which may be left in another context than it was entered in."""
        return Region(self._name, self._choose, self.brings_casts)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs inside the block."""
        if isinstance(function, (classmethod, staticmethod)):
            return type(function)(self(function.__func__))
        called = _called(function)
        if not callable(function) or inspect.isclass(function) or any(map(inspect.isasyncgenfunction, (function, called))):
            raise HmpError(f"@{self!r} expected a function, not a class or async generator, got {function!r}; write `with {self!r}:`")
        decorate = next((decorate for is_kind, decorate in _KINDS if is_kind(function) or is_kind(called)), _decorated)
        return cast("Callable[P, R]", functools.wraps(function)(decorate(self, function)))


def _called(function: Any) -> Any:
    """Return the function or method that a call of `function` calls: the one inside a partial, the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _decorated(region: Region, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_traced_unpatched() and not region.brings_casts:
            return function(*args, **kwargs)
        with region if torch.compiler.is_dynamo_compiling() else region._once():
            return function(*args, **kwargs)

    return wrapped


def _decorated_generator(region: Region, function: Callable[..., Any]) -> Callable[..., Any]:
    def generator(*args: Any, **kwargs: Any) -> Any:  # a function, which torch expects; `function` may be an object
        return (yield from function(*args, **kwargs))

    # its code runs inside the block, and the code that consumes it outside
    wrapped = torch_private.context_decorator(region._once, generator)
    is_awaitable = _called(function).__code__.co_flags & inspect.CO_ITERABLE_COROUTINE
    return types.coroutine(wrapped) if is_awaitable else wrapped


def _decorated_coroutine(region: Region, function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        with region._once():
            return await function(*args, **kwargs)

    return wrapped


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Region, Any], Any]], ...] = (
    (inspect.isgeneratorfunction, _decorated_generator),
    (inspect.iscoroutinefunction, _decorated_coroutine),
)


class _EmptyRegion(Region):
    """A block that does nothing, for torch.compile to trace while hmp has patched nothing (see `is_traced_unpatched`)."""

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def _region(name: str, choose: Callable[[PolicyTable | Off], PolicyTable | Off], function: Callable[P, R] | None) -> Any:
    region = (_EmptyRegion if is_traced_unpatched() else Region)(name, choose)
    return region if function is None else region(function)


def disable_casts(function: Callable[..., Any] | None = None) -> Any:
    """Switch hmp's casts off: a context manager, and a decorator with or without parentheses.

    Args:
        function: The function to decorate; None returns a context manager.

    Returns:
        The decorated function, or a context manager, which also decorates.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with hmp.casts("habana"), hmp.disable_casts():
        ...     torch.matmul(x, x).dtype
        torch.float32
    """
    return _region("disable_casts()", lambda state: state.off, function)


def enable_casts(function: Callable[..., Any] | None = None) -> Any:
    """Switch hmp's casts on again inside `hmp.disable_casts()`: the policy that was active outside of it is active.

    Args:
        function: The function to decorate; None returns a context manager.

    Returns:
        The decorated function, or a context manager, which also decorates.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with hmp.casts("habana"), hmp.disable_casts(), hmp.enable_casts():
        ...     torch.matmul(x, x).dtype
        torch.bfloat16
    """
    return _region("enable_casts()", lambda state: state.on, function)


def without_casts(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls `function` with casts off, in all steps of a coroutine or generator.

    Raises:
        HmpError: It is an async generator: lists would apply in its steps.
    """
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return disable_casts(function)  # type: ignore[no-any-return]

    def called_without_casts(*args: P.args, **kwargs: P.kwargs) -> R:
        # call_without_casts(), written out: torch's Python functions are called through this
        before = get()
        off = (before.now or active_state(before)).off
        try:
            put(off)
            return function(*args, **kwargs)
        finally:
            put(before)

    return called_without_casts
