"""The casts in force in this thread or task, or none: what every wrapper reads, and the regions that set it.

A ContextVar holds it, so threads and asyncio tasks never see each other's regions. It holds one of

- nothing, or PROCESS: what `convert()` put in force for the whole process, maybe nothing;
- a `Casts`: a policy's wrappers, put in force by `casts()` or `apply()`;
- the `Off` of either: no casts, and what `enable_casts()` goes back to;
- the `InBackward` of either: no lists, for user Python that autograd calls.

While nobody in the process is in a region there is no need to ask it: `live` is empty then, and a wrapper looks at that first.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import torch

from .errors import HmpError

P = ParamSpec("P")
R = TypeVar("R")
Table = Mapping[Any, Callable[..., Any]]


class Off:
    """No casts here. `table` is empty for ever, so that a wrapper needs no other question."""

    __slots__ = ("on",)
    table: Table = types.MappingProxyType({})
    policy = None
    given = None
    disabled = True

    def __init__(self, on: Casts) -> None:
        self.on = on

    @property
    def application(self) -> int:
        """That of the casts that `enable_casts()` brings back."""
        return self.on.application

    @property
    def off(self) -> Off:
        return self

    @property
    def in_backward(self) -> Off:
        return self  # inside disable_casts() torch is exactly torch, backward too


class InBackward(Off):
    """No lists here (R13), but what torch refuses is still made to fit (R7, R11): forward had casts, so that a gradient may be in
    another dtype than a weight, in code that never met the two."""

    __slots__ = ()

    @property
    def table(self) -> Table:  # type: ignore[override]  # a property where Off has a constant
        """The wrappers for what torch refuses."""
        return MADE_TO_FIT

    @property
    def off(self) -> Off:
        return self.on.off

    @property
    def in_backward(self) -> Off:
        return self


class Casts:
    """Casts in force: `table` maps a torch function to what is called in its place, `policy` is where it came from, and `looks` says
    how to see, before a call, that it has nothing to cast.

    Of a policy whose scoped lines were resolved for a model, `policy` is what holds in one module and `given` the whole; `application` is
    the number of that resolution, by which submodules know what they put in force, and 0 where there was none.
    """

    __slots__ = ("__weakref__", "application", "given", "in_backward", "looks", "off", "policy", "table")
    disabled = False

    def __init__(
        self, table: Table, policy: Any, looks: Mapping[Any, Any] = types.MappingProxyType({}), given: Any = None, application: int = 0
    ) -> None:
        self.table = table
        self.policy = policy
        self.looks = looks
        self.given = policy if given is None else given
        self.application = application
        self.off = Off(self)
        self.in_backward: Off = InBackward(self)

    @property
    def on(self) -> Casts:
        return self


NOTHING: Table = types.MappingProxyType({})
# What hmp does in backward while torch is patched, whatever the policy.
MADE_TO_FIT: Table = NOTHING
# One object for the life of the process: convert() and revert() replace its table, so every thread sees them at its next op.
PROCESS = Casts(NOTHING, None)

_here: ContextVar[Casts | Off | None] = ContextVar("hmp_casts", default=None)
# What the regions entered in this context found, innermost first. Kept here and not in the region objects: one object may be
# entered by many threads at once.
_found: ContextVar[tuple[Any, ...]] = ContextVar("hmp_found", default=())

get = _here.get
put = _here.set

# One entry for everything that may make a context hold something other than PROCESS. It is a list and no number because its
# append and pop are atomic; what is in it means nothing, only whether anything is.
live: list[None] = []


class Entered:
    """Keeps `live` from being empty for as long as it is referred to: by the context of a region, and by copies of it that outlive
    the region (a task that was started inside)."""

    __slots__ = ()

    def __init__(self) -> None:
        live.append(None)

    def __del__(self, pop: Callable[[], None] = live.pop) -> None:  # an argument: globals are gone when the interpreter ends
        pop()


# On its own threads autograd keeps the ContextVars of the caller of backward() under this name (torch 2.9 and later), but for
# what follows a nested backward and for a backward that C++ starts.
_key_in_tls: Callable[[str], bool] = getattr(torch._C, "_is_key_in_tls", lambda key: False)
_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # -1 where this thread is not in a backward


def settle() -> Casts | Off:
    """What is in force in a context that never said: PROCESS, and in autograd's threads what the caller of backward() has there."""
    if _graph_task_id() == -1:
        put(PROCESS)  # remembered, so that the question is asked once a thread
        return PROCESS
    caller = torch._C._get_obj_in_tls("context") if _key_in_tls("context") else None
    found = caller.get(_here) if caller is not None else None
    return (found or PROCESS).in_backward


def here() -> Casts | Off:
    """What is in force for the calling thread or task."""
    return get() or settle()


_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def traced_plainly() -> bool:
    """Whether torch.compile traces this code while hmp has nothing in place (compile_bridge): it knows no ContextVar, and nothing is
    in force then."""
    return _compiling()


def policy_here() -> Any:
    """The policy in force for the calling thread or task, None where nothing is cast."""
    return None if _compiling() else here().policy


def casts_enabled() -> bool:
    """Whether ops called here and now are cast, for the calling thread or task."""
    return not _compiling() and here().policy is not None


def call_under(state: Casts | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What `function` returns when called with `state` in force."""
    before = get()
    live.append(None)
    put(state)
    try:
        return function(*args, **kwargs)
    finally:
        # the value, not a token: a token cannot be reset from another context
        put(before)
        live.pop()


def call_without_casts(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What `function` returns when called with casts off."""
    return call_under(here().off, function, *args, **kwargs)


def call_in_backward(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What `function`, which runs backward, returns: user Python in it runs without lists (R13)."""
    return call_under(here().in_backward, function, *args, **kwargs)


class Bound:
    """A callable that runs under what was in force where it was made, in whatever thread it is called.

    Raises HmpError when that is no longer possible: other casts would mean other numbers than the first run's (R14).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.state = here()
        self.policy = self.state.policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        if self.policy is None:
            state = state if state.policy is None else state.off
        elif state.policy != self.policy:
            since = "revert()" if state.policy is None else f"convert() to {state.policy.name!r}"
            raise HmpError(
                f"this call first ran under policy {self.policy.name!r} and runs again after {since} (a checkpoint's "
                "recomputation?); its numbers would differ. Call backward() before the policy changes"
            )
        return call_under(state, self.function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


class Region:
    """A stretch of one thread or task in which `choose(what is in force)` is in force.

    Context manager and decorator (functions, generators, coroutines, asynchronous generators); nests; an exception
    restores what was before.
    """

    def __init__(self, name: str, choose: Callable[[Casts | Off], Casts | Off], brings_casts: bool = False) -> None:
        self._name = name
        self._choose = choose
        self._brings_casts = brings_casts

    def __repr__(self) -> str:
        return f"hmp.{self._name}"

    def __enter__(self) -> None:
        if _compiling() and not self._brings_casts:
            return  # traced plainly
        before = get()
        chosen = self._choose(before or settle())
        _found.set((before, Entered(), _found.get()))
        put(chosen)

    def __exit__(self, *exc_info: object) -> None:
        if _compiling() and not self._brings_casts:
            return  # traced plainly
        found = _found.get()
        before, _, rest = found if found else (None, None, ())  # left in another context than entered: nothing was found there
        put(before)
        _found.set(rest)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isclass(function):
            raise HmpError(f"{self!r} decorates functions, not classes; decorate the methods of {function.__name__}")
        wrapped: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self:
                    return await function(*args, **kwargs)

        elif inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
                generator: Any = function(*args, **kwargs)
                step: Any = generator.__anext__
                argument: tuple[Any, ...] = ()
                try:
                    while True:
                        try:
                            with self:
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
                    with self:
                        await generator.aclose()

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
                return (yield from _Steps(self, function(*args, **kwargs)))

        else:

            @functools.wraps(function)
            def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
                if traced_plainly() and not self._brings_casts:
                    return function(*args, **kwargs)
                with self:
                    return function(*args, **kwargs)

        return cast("Callable[P, R]", wrapped)


class _Steps:
    """A generator whose every step runs inside the region, while its consumer stays outside."""

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


def _region_or_decorated(region: Region, function: Callable[P, R] | None) -> Any:
    return region if function is None else region(function)


def disable_casts(function: Callable[..., Any] | None = None) -> Any:
    """A region in which torch is exactly torch: `with hmp.disable_casts():`, or a decorator with or without parentheses."""
    return _region_or_decorated(Region("disable_casts()", lambda state: state.off), function)


def enable_casts(function: Callable[..., Any] | None = None) -> Any:
    """A region that undoes `disable_casts()` around it: the policy that was in force before is in force again."""
    return _region_or_decorated(Region("enable_casts()", lambda state: state.on), function)


def without_casts(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose calls run with casts off; a coroutine or a generator until it ends."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return disable_casts(function)  # type: ignore[no-any-return]

    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        before = get()  # call_without_casts, written out: composites run through this at every call
        live.append(None)
        put((before or settle()).off)
        try:
            return function(*args, **kwargs)
        finally:
            put(before)
            live.pop()

    return quiet
