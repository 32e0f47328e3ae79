"""The casts in force in this thread or task, or none: what every wrapper reads, and the stretches that set it.

In force is one of

- PROCESS: what `convert()` put in force for the whole process, maybe nothing;
- a `Casts`: a policy's wrappers, put in force by `casts()` or `apply()`;
- the `Off` of either: no casts, and what `enable_casts()` goes back to;
- the `InBackward` of either: no lists, for user Python that autograd calls.

A ContextVar says which, so threads and asyncio tasks never see each other's regions. It holds the state, or the `Stretch` that put it
in force, which knows whether it has ended. While nobody in the process is in one there is no need to ask: `live` is empty then, and a
wrapper looks at that first.

An interrupt (Ctrl-C) is raised in the middle of this code as of any: CPython looks for one where a Python function begins, where a loop
begins again, and after a call of a C function. So what is put in force is put there in the `try` whose `finally` takes it away, and what
must not be missed is the first step of its handler, or the end of an object whose `__del__` is a builtin.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from .. import torch_private
from ..errors import HmpError

P = ParamSpec("P")
R = TypeVar("R")
Table = Mapping[Any, Callable[..., Any]]


class Off:
    """No casts here. `table` is empty for ever, so that a wrapper needs no other question."""

    __slots__ = ("now", "on")
    table: Table = types.MappingProxyType({})
    policy = None
    given = None
    disabled = True

    def __init__(self, on: CompiledPolicy) -> None:
        self.on = on
        self.now: CompiledPolicy | Off | None = (
            None  # what a context holds says what is in force by this; None: that takes a look (`settled`)
        )

    @property
    def scope_id(self) -> int:
        """That of the casts that `enable_casts()` brings back."""
        return self.on.scope_id

    @property
    def off(self) -> Off:
        return self

    def in_force(self) -> CompiledPolicy | Off:
        """What is in force where a context holds this."""
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
        return DTYPE_REPAIRS

    @property
    def off(self) -> Off:
        return self.on.off

    @property
    def in_backward(self) -> Off:
        return self


class CompiledPolicy:
    """A policy as it is called: `table` maps a torch function to what is called in its place, `policy` where it came from, `fast_paths`
    how to see, before a call, that it has nothing to cast.

    Of a policy whose scoped lines were resolved for a model, `policy` is what holds in one module and `given` the whole; `application` is
    the number of that resolution, by which submodules know what they put in force, and 0 where there was none.
    """

    __slots__ = ("__weakref__", "fast_paths", "given", "in_backward", "now", "off", "policy", "scope_id", "table")
    disabled = False

    def __init__(
        self, table: Table, policy: Any, fast_paths: Mapping[Any, Any] = types.MappingProxyType({}), given: Any = None, scope_id: int = 0
    ) -> None:
        self.table = table
        self.policy = policy
        self.fast_paths = fast_paths
        self.given = policy if given is None else given
        self.scope_id = scope_id
        self.now = self
        self.off = Off(self)
        self.in_backward: Off = InBackward(self)

    @property
    def on(self) -> CompiledPolicy:
        return self


NOTHING: Table = types.MappingProxyType({})
# What hmp does in backward while torch is patched, whatever the policy.
DTYPE_REPAIRS: Table = NOTHING
# One object for the life of the process: convert() and revert() replace its table, so every thread sees them at its next op.
PROCESS = CompiledPolicy(NOTHING, None)

# One entry for everything that may make a context hold something other than PROCESS. It is a list and no number because its
# append and pop are atomic; what is in it means nothing, only whether anything is.
regions_open: list[None] = []


class Entered:
    """Keeps `live` from being empty for as long as it is referred to. Made by `Entered(None)`, of builtins alone: there is no Python code
    that an interrupt could leave in its middle."""

    __slots__ = ()
    __init__ = regions_open.append  # a builtin is not bound: called with None
    __del__ = regions_open.pop  # and with nothing


class Stretch(Entered):
    """A stretch of one thread or task in which `state` is in force: `now`, until it ends and that is None for ever.

    `before` is what the context held. Stretches need not nest: a generator that is suspended in a region is closed when somebody closes
    it, or the garbage collector does, in the middle of whatever the thread is doing. So one that has ended is looked through wherever it
    is found. In a copy of the context (a task that was started inside) its state stays in force.
    """

    __slots__ = ("__weakref__", "before", "ending", "key", "now", "state", "token")
    now: CompiledPolicy | Off | None
    state: CompiledPolicy | Off
    before: Held
    key: object  # what the user left and entered
    token: Token[Held] | None
    ending: object  # what a `with` ends it by: collected no sooner than this


class Unset:
    """What a context holds that never said."""

    __slots__ = ()
    now = None


Held: TypeAlias = "CompiledPolicy | Off | Stretch | Unset"
UNSET = Unset()
_here: ContextVar[Held] = ContextVar("hmp_casts", default=UNSET)

get = _here.get
put = _here.set


def stretch(state: CompiledPolicy | Off, key: object = None) -> Stretch:
    """A stretch that has not begun."""
    made: Stretch = Stretch(None)
    made.state, made.key, made.now, made.token, made.ending = state, key, None, None, None
    return made


def begin(new: Stretch) -> None:
    """Has the stretch begin here. It is to be called in a `try` that ends the stretch, for an interrupt may land as soon as it returns."""
    new.before = get()
    new.now = new.state
    new.token = put(new)


def end(old: Stretch) -> None:
    """Has the stretch end, wherever it began. It has with the first line; the rest makes what is in force quick to find."""
    old.now = None
    if get() is old:
        put(old.before)
    old.ending = None  # which refers to it


def in_force(held: Held) -> CompiledPolicy | Off:
    """What is in force in this context, which holds `held`."""
    if isinstance(held, Off):
        return held.in_force()
    if isinstance(held, CompiledPolicy):
        return held
    return inherit_from_caller() if isinstance(held, Unset) else held.now or _looked_through(held)


def _looked_through(ended: Stretch) -> CompiledPolicy | Off:
    """What is in force below a stretch that has ended, and is found at once from now on."""
    top = get()
    below: Held = ended
    while isinstance(below, Stretch) and below.now is None:
        if not _began_here(below):
            # this context is a copy of the one that left the region
            kept = stretch(below.state)
            kept.before, kept.now = below.before, kept.state
            kept.token = put(kept)
            below = kept
        else:
            below = below.before
    put(below if top is ended else top)
    return in_force(below)


def _began_here(ended: Stretch) -> bool:
    """Whether the stretch began in this very context."""
    if ended.token is not None:
        try:
            _here.reset(ended.token)  # a token is of one context, and of one use
        except (ValueError, RuntimeError):
            return False
    ended.token = put(ended)
    return True


# On its own threads autograd keeps the ContextVars of the caller of backward() under this name (torch 2.9 and later), but for
# what follows a nested backward and for a backward that C++ starts.
_is_kept, _kept = torch_private.is_kept_in_thread, torch_private.kept_in_thread
_graph_task = torch_private.graph_task


def inherit_from_caller() -> CompiledPolicy | Off:
    """What is in force in a context that never said: PROCESS, and in autograd's threads what the caller of backward() has there."""
    if _graph_task() == -1:
        put(PROCESS)  # remembered, so that the question is asked once a thread
        return PROCESS
    caller = _kept("context") if _is_kept("context") else None
    found = caller.get(_here) if caller is not None else None
    if isinstance(found, Stretch):
        found = found.state  # the context is a copy
    return (PROCESS if found is None or isinstance(found, Unset) else found).in_backward


def here() -> CompiledPolicy | Off:
    """What is in force for the calling thread or task."""
    held = get()
    return held.now or in_force(held)


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


def call_under(state: CompiledPolicy | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What `function` returns when called with `state` in force."""
    called = Stretch(None)  # stretch(), begin() and end(), written out
    called.state = called.now = state
    called.before = before = get()
    try:
        called.token = put(called)
        return function(*args, **kwargs)
    finally:
        called.now = None
        put(before)  # the value, not the token: a token cannot be reset from another context
        del called  # a traceback refers to this frame


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
