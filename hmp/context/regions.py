"""Regions: what `hmp.casts()`, `disable_casts()` and `enable_casts()` return, for `with` and as decorators.

At the end of its block `with` calls `__exit__`. If that were a Python function, an interrupt (Ctrl-C) could be raised as it begins, and the
region would stay in force for ever. So a region's `__exit__` is a builtin, that of io.IOBase. It calls `close`, which is the close() of a
generator that is suspended inside a `try`, whose `finally` ends the region.

Between an `__enter__` and the block, Python 3.14 raises an interrupt where it calls `__enter__` as a C function calls it: that is what it
does with every function while Dynamo runs frames. Then `with` drops `__exit__` without calling it, and so it does in Python 3.10 where an
interrupt comes as an error ends the block. So the generator is freed with that.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import io
import threading
import weakref
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ..errors import HmpError
from . import state
from .state import (
    CompiledPolicy,
    EnteredRegion,
    Off,
    begin,
    call_in,
    current_state,
    end,
    entered_region,
    get,
    in_force,
    is_traced_unpatched,
    put,
    regions_open,
)
from .suspensions import call_innermost, suspend

P = ParamSpec("P")
R = TypeVar("R")

_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
# What was entered in this context, innermost first: `__exit__` knows only the Region object, which many threads may have entered at once.
_open: ContextVar[tuple[weakref.ref[EnteredRegion], ...]] = ContextVar("hmp_open", default=())


class _Holder(datetime.tzinfo):
    """Holds what ends a region, for a datetime.time: the garbage collector does not look into one.

    It would else find the generator that ends a region with the user's that is suspended in it, and finalize the two in any order.
    """

    __slots__ = ("ending",)
    ending: Generator[None]


class _Exit(io.IOBase):
    """The object whose `__exit__` a `with` calls: io.IOBase has one that is written in C, and calls `close`."""

    closed = True  # so that io.IOBase does not close it when it is freed  # type: ignore[assignment]
    region: Region
    holds: datetime.time

    def close(self) -> None:
        """Leaves the region. Where a `with` entered it, `Region.__enter__` has put a builtin in place of this that ends that entering."""
        _leave(self.region)


class _LookedUp(threading.local):
    exit: weakref.ref[_Exit] | None = None  # what this thread's last look-up of `__exit__` made: `with` calls `__enter__` after it


_looked_up = _LookedUp()


class _ExitOf:
    """The attribute `__exit__` of a region: each look-up on a region gives a builtin of its own, for one `with`; on the class, `_leave`."""

    def __get__(self, region: Region | None, owner: type | None = None) -> Callable[..., None]:
        if region is None:
            return _leave
        made = _Exit()
        made.region = region
        _looked_up.exit = weakref.ref(made)
        return made.__exit__


def _leave(region: Region, *exc_info: object) -> None:
    for reference in _open.get():
        entered = reference()
        if entered is not None and entered.key is region and entered.now is not None:
            end(entered)
            return
    # it was entered in another context: there is nothing to leave in this one


def _ending(entered: EnteredRegion) -> Generator[None]:
    try:
        yield
    finally:
        try:  # Python 3.10 looks for interrupts where a `finally` begins after an error, but not in front of a `try`
            entered.now = None  # end(), written out: an interrupt may be raised where a function is called
            if state.get() is entered:
                state.put(entered.before)
        finally:
            if entered.suspension is not None:
                entered.suspension.end()


class Region:
    """A context manager and decorator: inside it `choose(state)` is in force in this thread or task, for the `state` in force around it.

    It decorates functions, generators, coroutines and asynchronous generators, nests, and can be entered again. At its end, by an
    exception too, the state around it is in force again. `brings_casts` is whether it puts a policy in force: one that may not have been in
    force before, inside which the regions of torch.autocast around it are off (R17).
    """

    def __init__(self, name: str, choose: Callable[[CompiledPolicy | Off], CompiledPolicy | Off], brings_casts: bool = False) -> None:
        self._name = name
        self._choose = choose
        self.brings_casts = brings_casts

    def __repr__(self) -> str:
        return f"hmp.{self._name}"

    def __enter__(self) -> Region:
        reference, _looked_up.exit = _looked_up.exit, None
        leaving = reference() if reference is not None else None
        entered = entered_region(self._choose(current_state()), self)
        opened = _open.get()
        if len(opened) > 8:
            opened = tuple([each for each in opened if each() is not None])
        _open.set((weakref.ref(entered), *opened))
        try:
            if leaving is not None and leaving.region is self:  # otherwise it is not a `with` that calls this
                holder = _Holder()  # type: ignore[abstract]  # tzinfo is abstract in typeshed alone
                holder.ending = ending = _ending(entered)
                next(ending)
                leaving.holds = datetime.time(0, 0, 0, 0, holder)
                leaving.close = ending.close  # type: ignore[method-assign]
            if self.brings_casts:
                entered.suspension = suspend()
            begin(entered)
        except BaseException:
            entered.now = None  # it may have begun: where Dynamo runs frames, interrupts are raised after calls of Python functions too
            entered.suspension = None  # which ends it
            raise
        return self

    __exit__ = _ExitOf()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isclass(function):
            raise HmpError(f"{self!r} decorates functions, not classes; decorate the methods of {function.__name__}")
        if not callable(function):
            raise HmpError(f"{self!r} decorates functions, and {function!r} is none; write `with {self!r}:` or `@{self!r}` above one")
        decorate = next((decorate for is_kind, decorate in _KINDS if is_kind(function)), _decorated)
        return cast("Callable[P, R]", functools.wraps(function)(decorate(self, function)))


def _decorated(region: Region, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not _compiling():
            chosen = region._choose(current_state())
            if region.brings_casts:
                return call_innermost(chosen, function, *args, **kwargs)
            return call_in(chosen, region, function, args, kwargs)
        if is_traced_unpatched() and not region.brings_casts:
            return function(*args, **kwargs)
        with region:
            return function(*args, **kwargs)

    return wrapped


def _decorated_generator(region: Region, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return (yield from _Steps(region, function(*args, **kwargs)))

    return wrapped


def _decorated_coroutine(region: Region, function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        with region:
            return await function(*args, **kwargs)

    return wrapped


def _decorated_async_generator(region: Region, function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        generator: Any = function(*args, **kwargs)
        step: Any = generator.__anext__
        argument: tuple[Any, ...] = ()
        try:
            while True:
                try:
                    with region:
                        item = await step(*argument)
                except StopAsyncIteration:
                    return
                try:
                    step, argument = generator.asend, ((yield item),)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step, argument = generator.athrow, (error,)
        finally:
            with region:
                await generator.aclose()

    return wrapped


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Region, Any], Any]], ...] = (
    (inspect.isgeneratorfunction, _decorated_generator),
    (inspect.iscoroutinefunction, _decorated_coroutine),
    (inspect.isasyncgenfunction, _decorated_async_generator),
)


class _Steps:
    """Iterates over `generator`, whose code runs inside the region; the code that consumes it runs outside."""

    def __init__(self, region: Region, generator: Any) -> None:
        self._region = region
        self._generator = generator

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> Any:
        with self._region:
            return next(self._generator)

    def send(self, value: Any) -> Any:
        with self._region:
            return self._generator.send(value)

    def throw(self, *exc_info: Any) -> Any:
        with self._region:
            return self._generator.throw(*exc_info)

    def close(self) -> None:
        with self._region:
            self._generator.close()


class _EmptyRegion(Region):
    """A region that does nothing, for torch.compile to trace while hmp has patched nothing (see `is_traced_unpatched`)."""

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def _region(name: str, choose: Callable[[CompiledPolicy | Off], CompiledPolicy | Off], function: Callable[P, R] | None) -> Any:
    region = (_EmptyRegion if is_traced_unpatched() else Region)(name, choose)
    return region if function is None else region(function)


def disable_casts(function: Callable[..., Any] | None = None) -> Any:
    """A region in which hmp casts nothing: `with hmp.disable_casts():`, or a decorator with or without parentheses."""
    return _region("disable_casts()", lambda state: state.off, function)


def enable_casts(function: Callable[..., Any] | None = None) -> Any:
    """A region that undoes `disable_casts()` around it: the policy that was in force outside that one is in force again."""
    return _region("enable_casts()", lambda state: state.on, function)


def without_casts(function: Callable[P, R]) -> Callable[P, R]:
    """A function that calls `function` with casts off; all steps of a coroutine or a generator run with casts off."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return disable_casts(function)  # type: ignore[no-any-return]

    def called_without_casts(*args: P.args, **kwargs: P.kwargs) -> R:
        # call_without_casts() without an EnteredRegion: torch's Python functions are called through this, and start no asyncio task
        before = get()
        off = (before.now or in_force(before)).off
        try:
            regions_open.append(None)
            put(off)
            return function(*args, **kwargs)
        finally:
            try:
                put(before)
            finally:
                regions_open.pop()

    return called_without_casts
