"""Which policy is in force in this thread or asyncio task. Every dispatcher and wrapper asks here before it casts.

The answer is one of four states:

- PROCESS: the policy of `convert()`, which holds for the whole process. It has no policy before the first `convert()`.
- another `CompiledPolicy`: the policy of a `casts()` region, or of a module that `apply()` was called on.
- the `Off` of one of these: nothing is cast. It remembers the policy that `enable_casts()` is to bring back.
- the `InBackward` of one of these: no list applies, in user Python that autograd calls (R13).

A ContextVar holds the state, so that threads and asyncio tasks never see each other's regions. Inside a region it holds a `Stretch`, which
knows the region's state and whether the region has ended. While no thread is in any region `regions_open` is empty, PROCESS holds
everywhere, and a dispatcher needs no look at the ContextVar.

An interrupt (Ctrl-C) can be raised in the middle of this code. CPython checks for one where a Python function begins, where a loop goes
round, and after a call of a C function. So a state is set inside the `try` whose `finally` takes it back, and the step that must not
be missed is the first one of that `finally`, or the `__del__` of an object where that is a builtin.
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
    """The state in which nothing is cast. `on` is the policy that `enable_casts()` brings back; `table` stays empty, so that who looks
    an op up finds nothing and calls torch's own."""

    __slots__ = ("now", "on")
    table: Table = types.MappingProxyType({})
    policy = None
    given = None
    disabled = True

    def __init__(self, on: CompiledPolicy) -> None:
        self.on = on
        self.now: CompiledPolicy | Off | None = self  # None in a subclass: `in_force()` below is to be asked

    @property
    def scope_id(self) -> int:
        """The scope id of the policy that `enable_casts()` brings back."""
        return self.on.scope_id

    @property
    def off(self) -> Off:
        return self

    def in_force(self) -> CompiledPolicy | Off:
        """The state that holds where the ContextVar holds this one: itself, or another one once a subclass's time is over."""
        return self

    @property
    def in_backward(self) -> Off:
        return self  # inside disable_casts() torch is exactly torch, backward too


class InBackward(Off):
    """The state of user Python that runs in backward: no list applies (R13), and only calls that torch would refuse are cast (R7, R11).

    Those still are because forward was cast: a gradient may be in another dtype than a weight, in code that expects one dtype."""

    __slots__ = ()

    @property
    def table(self) -> Table:  # type: ignore[override]  # a property where Off has a constant
        """The wrappers of ops that torch would refuse, of no others."""
        return DTYPE_REPAIRS

    @property
    def off(self) -> Off:
        return self.on.off

    @property
    def in_backward(self) -> Off:
        return self


class CompiledPolicy:
    """A policy made ready to run, and the state in which it is in force.

    `table` maps a torch function to the wrapper that is called in its place; `policy` is the policy that the table was made of, None
    once it is out of force; `fast_paths` tells a dispatcher how to see, before a call, that there is nothing to cast.

    Where a policy has scoped lines (`softmax @ decoder.*`), it is resolved for one model into several of these: `policy` is what holds in
    some of its modules, `given` the policy as the user gave it, and `scope_id` the number of that resolution, by which a submodule finds
    its own policy when it is called. It is 0 without scoped lines.
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
# The table of `InBackward`: wrappers of ops that torch would refuse, while torch is patched. The same under every policy.
DTYPE_REPAIRS: Table = NOTHING
# One object for the life of the process: convert() and revert() replace its table, so that every thread follows at its next op.
PROCESS = CompiledPolicy(NOTHING, None)

# Has one entry for each region, of any thread, that is not over: whether it is empty is all that anybody asks. A list, not a count,
# because append and pop are atomic.
regions_open: list[None] = []


class Entered:
    """An entry in `regions_open` for as long as this object lives. Made by `Entered(None)`; `__init__` and `__del__` are builtins, so
    that no interrupt can fall between the entry and the object."""

    __slots__ = ()
    __init__ = regions_open.append  # a builtin is not bound: called with None
    __del__ = regions_open.pop  # and with nothing


class Stretch(Entered):
    """A region that was entered: from then on `state` is in force in this thread or task. `now` is that state, and None once it ended.

    `before` is what the ContextVar held when the region was entered. Regions need not end in reverse order: a generator that is suspended
    in one may be closed, by the garbage collector too, while the thread is inside another. So whoever finds a stretch that has ended goes
    on to its `before`. A task that was started inside the region has a copy of the context, in which the state stays in force.
    """

    __slots__ = ("__weakref__", "before", "ending", "key", "now", "state", "token")
    now: CompiledPolicy | Off | None
    state: CompiledPolicy | Off
    before: Held
    key: object  # the Region object, which the user may enter many times
    token: Token[Held] | None
    ending: object  # the generator whose close() ends it, see regions: it must live as long as this


class Unset:
    """What the ContextVar holds in a context in which nobody has set it."""

    __slots__ = ()
    now = None


Held: TypeAlias = "CompiledPolicy | Off | Stretch | Unset"
UNSET = Unset()
_here: ContextVar[Held] = ContextVar("hmp_casts", default=UNSET)

get = _here.get
put = _here.set


def stretch(state: CompiledPolicy | Off, key: object = None) -> Stretch:
    """A stretch for `state` that `begin` is yet to put in force."""
    made: Stretch = Stretch(None)
    made.state, made.key, made.now, made.token, made.ending = state, key, None, None, None
    return made


def begin(new: Stretch) -> None:
    """Puts the stretch's state in force here. Call it in a `try` that ends the stretch: an interrupt may come as soon as it returns."""
    new.before = get()
    new.now = new.state
    new.token = put(new)


def end(old: Stretch) -> None:
    """Ends the stretch, in whatever context it began. The first line does that; the rest makes the state below it quick to find."""
    old.now = None
    if get() is old:
        put(old.before)
    old.ending = None  # which refers to it


def in_force(held: Held) -> CompiledPolicy | Off:
    """The state in force in this context, whose ContextVar holds `held`."""
    if isinstance(held, Off):
        return held.in_force()
    if isinstance(held, CompiledPolicy):
        return held
    return inherit_from_caller() if isinstance(held, Unset) else held.now or _looked_through(held)


def _looked_through(ended: Stretch) -> CompiledPolicy | Off:
    """The state below a stretch that has ended; the ContextVar is set so that the next one who asks finds it at once."""
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
    """Whether the stretch began in this context, and not in one that this is a copy of."""
    if ended.token is not None:
        try:
            _here.reset(ended.token)  # a token is of one context, and of one use
        except (ValueError, RuntimeError):
            return False
    ended.token = put(ended)
    return True


# autograd's own threads can ask for the ContextVars of the thread that called backward() (torch 2.9 and later). They cannot after a
# nested backward, nor in a backward that C++ code started.
_is_kept, _kept = torch_private.is_kept_in_thread, torch_private.kept_in_thread
_graph_task = torch_private.graph_task


def inherit_from_caller() -> CompiledPolicy | Off:
    """The state in a context that has never set one: PROCESS; in autograd's own threads the `InBackward` of what the caller of backward()
    has in force."""
    if _graph_task() == -1:
        put(PROCESS)  # remembered, so that the question is asked once a thread
        return PROCESS
    caller = _kept("context") if _is_kept("context") else None
    found = caller.get(_here) if caller is not None else None
    if isinstance(found, Stretch):
        found = found.state  # the context is a copy
    return (PROCESS if found is None or isinstance(found, Unset) else found).in_backward


def here() -> CompiledPolicy | Off:
    """The state in force in the calling thread or task."""
    held = get()
    return held.now or in_force(held)


_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def traced_plainly() -> bool:
    """Whether torch.compile is tracing this code before hmp has patched anything: Dynamo cannot trace a ContextVar, and no policy is in
    force then. Once torch is patched, torch_compile.bridge answers in this function's place."""
    return _compiling()


def policy_here() -> Any:
    """The policy in force for the calling thread or task, None where nothing is cast."""
    return None if _compiling() else here().policy


def casts_enabled() -> bool:
    """Whether ops called here and now are cast, for the calling thread or task."""
    return not _compiling() and here().policy is not None


def call_under(state: CompiledPolicy | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function`, called while `state` is in force."""
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
    """The result of `function`, called while nothing is cast."""
    return call_under(here().off, function, *args, **kwargs)


def call_in_backward(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function`, which runs a backward pass: no list applies to user Python in it (R13)."""
    return call_under(here().in_backward, function, *args, **kwargs)


class Bound:
    """A callable that runs under the state that was in force where it was made, in whatever thread it is called later.

    Checkpoints and optimizers' closures are called this way. HmpError if the policy has changed since: the call would give other numbers
    than it gave the first time (R14).
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
