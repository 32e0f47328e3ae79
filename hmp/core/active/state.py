"""The active state of this thread or asyncio task: the policy that casts, or none. Patched ops read it at each call.

It is one of four, but for `autocast.Paused`, an `Off`:

- PROCESS: the policy of `convert()`, for the whole process. It has no policy before the first `convert()`.
- another `PolicyTable`: the policy of a `casts()` context, or of a module that `apply()` was called on.
- the `Off` of one of these: nothing is cast. It has the policy that `enable_casts()` restores.
- the `InBackward` of one of these: no list applies, in user Python that autograd calls.

A ContextVar contains the state, so that threads and asyncio tasks never see each other's contexts. Inside a context it contains an
`EnteredRegion`, with its state until it has ended.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from threading import get_ident
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from ...errors import HmpError
from .. import torch_private

P = ParamSpec("P")
R = TypeVar("R")
Wrapper = Callable[..., Any]


class Replacements(dict[Any, Wrapper | None]):
    """Torch's function → the wrapper that replaces it, None for a function that is called as it is. Read it by `[]`.

    A wrapper is made at the first call of its function: a policy changes some four hundred functions, and a program calls thirty.

    Args:
        functions: The functions that are replaced.
        make: Returns the wrapper of one of them, or None.
    """

    __slots__ = ("_make", "functions")

    def __init__(self, functions: AbstractSet[Any] = frozenset(), make: Callable[[Any], Wrapper | None] | None = None) -> None:
        self.functions = functions
        self._make = make

    def __missing__(self, function: Any) -> Wrapper | None:
        wrapper = self._make(function) if self._make is not None and function in self.functions else None
        return self.setdefault(function, wrapper)  # two threads at once get the same wrapper, which counts fallbacks


NO_REPLACEMENTS = Replacements()


class Off:
    """The state in which nothing is cast.

    `on` is the policy that `enable_casts()` brings back. `replacements` is empty, so that patched ops call torch's own functions. Inside
    `disable_casts()` torch is unchanged, also in backward.

    Args:
        on: The policy that `enable_casts()` restores.
    """

    __slots__ = ("in_backward", "now", "off", "on")
    replacements: Replacements = NO_REPLACEMENTS
    policy = None
    user_policy = None
    disabled = True

    def __init__(self, on: PolicyTable) -> None:
        self.on = on
        self.now: Off = self
        self.off: Off = self
        self.in_backward: Off = self

    @property
    def scope_id(self) -> int:
        """Return the scope id of the policy that `enable_casts()` restores."""
        return self.on.scope_id


class InBackward(Off):
    """The state of user Python that runs in backward: no list applies.

    Only the inputs of calls that torch would refuse are cast: because forward was cast, a gradient may have another dtype than a weight in
    code that expects one dtype. Where backward was called outside of all policies, that holds for the nodes of the graph that were made
    under one; elsewhere torch raises what it raises without hmp.
    """

    __slots__ = ()

    def __init__(self, on: PolicyTable) -> None:
        super().__init__(on)
        self.off = on.off

    @property
    def replacements(self) -> Replacements:  # type: ignore[override]  # a property where Off has a constant
        """Return the wrappers of ops that torch may refuse to run; none where forward was not cast."""
        return DTYPE_REPAIRS if self.on.policy is not None or _MADE_HERE in _notes(_current_node()) else NO_REPLACEMENTS


_current_node: Callable[[], Any] = torch_private.current_node
_MADE_HERE = "_hmp_made_under_policy"


def mark(node: Any) -> None:
    """Note that a node runs user Python in backward that is made under a policy, if one is active: a Function, or a tensor's hook."""
    if node is not None and current_state().replacements.functions:
        _notes(node)[_MADE_HERE] = True


def _notes(node: Any) -> Any:
    # a Function has no metadata once torch's own part of it is gone; outside of a node there is nothing to note
    return vars(node) if hasattr(node, "__dict__") else getattr(node, "metadata", {})


_numbers = itertools.count(1)


class PolicyTable:
    """A policy with its wrappers, and the state in which it is active.

    A policy with scoped entries (`softmax @ decoder.*`) is resolved for one model into several tables, one for the modules with the same
    entries.

    Args:
        replacements: Torch's function → the wrapper that replaces it.
        policy: The policy of the wrappers, in these modules; None after revert().
        user_policy: The policy that the user passed; None if it is `policy`.
        scope_id: A number that the tables of one policy and model share, by which a submodule finds its own; 0 without scoped entries.

    Attributes:
        number: Another one for each table, from 1.
        now: Itself, as `EnteredRegion.now` is what is active in its block: a call reads it without asking which of them it has.
        parts: The tables that scoped entries give submodules: they live as long as this one, which is active around their calls.
    """

    __slots__ = ("__weakref__", "in_backward", "now", "number", "off", "on", "parts", "policy", "replacements", "scope_id", "user_policy")
    disabled = False

    def __init__(self, replacements: Replacements, policy: Any, user_policy: Any = None, scope_id: int = 0) -> None:
        self.replacements = replacements
        self.policy = policy
        self.user_policy = policy if user_policy is None else user_policy
        self.scope_id = scope_id
        self.number = next(_numbers)
        self.parts: tuple[PolicyTable, ...] = ()
        self.now = self.on = self
        self.off = Off(self)
        self.in_backward: Off = InBackward(self)


# The `replacements` of every `InBackward`; empty while torch is not patched.
DTYPE_REPAIRS: Replacements = NO_REPLACEMENTS
# One object for the life of the process: convert() and revert() set its attributes, which every thread reads at its next op.
PROCESS = PolicyTable(NO_REPLACEMENTS, None)
process_table = PROCESS  # the table that it has those of; a call of a module keeps it until it ends, whoever converts or reverts meanwhile


class EnteredRegion:
    """One entry into a block: `state` is active in this thread or task until it ends.

    Blocks need not end in reverse order: a generator that is suspended in one may be closed, also by the garbage collector, while the
    thread is inside another. So if the ContextVar contains an entry that has ended, its `before` applies. A task that was started inside
    the block has a copy of the context, in which the state stays active.

    Args:
        state: The state inside the block.
        key: The `Region` object, which the user may enter many times; None for hmp's own.

    Attributes:
        now: `state`, or None once the block has ended while it was not the innermost one.
        before: The value of the ContextVar when the block was entered.
        during: What lasts as long as this: what turns torch.autocast off, a Running.
    """

    __slots__ = ("__weakref__", "_token", "before", "during", "key", "now")

    def __init__(self, state: PolicyTable | Off, key: object = None) -> None:
        self.now: PolicyTable | Off | None = state
        self.key = key
        self.during: list[Any] = []

    def begin(self) -> None:
        """Activate the state in this thread or task."""
        self.before: ContextValue = get()
        self._token = put(self)

    def end(self) -> None:
        """End the block, in any context."""
        try:
            if get() is self:
                _current.reset(self._token)
            else:
                self.now = None
        except ValueError:  # in another context, such as that of a task, which may be a copy
            self.now = None
        for each in self.during:
            each.end()


class Unset:
    """The value of the ContextVar in a context in which it was never set."""

    __slots__ = ()
    now = None


ContextValue: TypeAlias = "PolicyTable | Off | EnteredRegion | Unset"
UNSET = Unset()
_current: ContextVar[ContextValue] = ContextVar("hmp_casts", default=UNSET)

get = _current.get
put = _current.set


def active_state(value: ContextValue) -> PolicyTable | Off:
    """Return the state that is active in this context, whose ContextVar contains `value`."""
    below = value
    while (found := below.now) is None and isinstance(below, EnteredRegion):
        below = below.before
    if below is not value:
        put(below)  # for the next reader
    return found or _inherited_state()


def entered_here() -> Iterator[EnteredRegion]:
    """Return the blocks that this context is in, innermost first."""
    value = get()
    while isinstance(value, EnteredRegion):
        if value.now is not None:
            yield value
        value = value.before


_graph_task = torch_private.graph_task
_calling_backward: dict[object, Off] = {}  # the state in each call of backward() that has not returned, of any thread


def _inherited_state() -> PolicyTable | Off:
    """Return the state in a context in which none was ever set: PROCESS, or in autograd's threads that of the running backward.

    Where several backwards run at once in different states, it is not known which of them a thread of autograd's works for.
    """
    if _graph_task() == -1:
        put(PROCESS)  # so that this runs once a thread
        return PROCESS
    found = set(_calling_backward.values())  # at once: other threads cannot come in between
    return found.pop() if len(found) == 1 else PROCESS.in_backward


class Running:
    """A call of a model, or of code under a captured state, or a `casts()` block, that has not ended.

    Copies of casts live as long as the outermost of this thread.

    Attributes:
        is_call: True for a call of a model, for which `when_ended()` waits in each thread.
        thread: The thread that it is in; 0 once it has ended.
        copies: The copies of casts, None before the first.
    """

    __slots__ = ("_before", "copies", "is_call", "thread")

    def __init__(self, is_call: bool = True) -> None:
        global outermost_number
        self._before = outermost.get()
        self.is_call, self.thread = is_call, get_ident()
        self.copies: Any = None
        _running.add(self)
        if not _is_here(self._before):
            outermost.set(self)
            outermost_number += 1  # two threads may get the same: it only says that a call may be another one than before

    def end(self) -> None:
        """End it, in any context, and do what waited for it."""
        copies, self.copies, self.thread = self.copies, None, 0
        if outermost.get() is self:
            outermost.set(self._before)
        if copies is not None:
            copies.end()
        _running.discard(self)
        if _waiting:
            _do_what_waited()


outermost: ContextVar[Running | None] = ContextVar("hmp_outermost", default=None)
outermost_number = 0  # of the one that began last
_running: set[Running] = set()
_waiting: list[tuple[Callable[[], object], int]] = []


def begin_outermost() -> Running | None:
    """Begin an outermost call; None inside of one."""
    return None if _is_here(outermost.get()) else Running()


def _is_here(found: Running | None) -> bool:
    """Return True if this thread is in what `outermost` contains, which may have ended, or have come with a copy of the context."""
    return found is not None and found.thread == get_ident()


def when_ended(act: Callable[[], object]) -> None:
    """Call `act` once no call is running and no other thread than this one is in a block: now, or when the last of them ends."""
    _waiting.append((act, get_ident()))  # first: what ends from now on sees it
    _do_what_waited()


def _do_what_waited() -> None:
    for each in list(_waiting):
        others = sys._current_frames().keys() - {each[1]}
        if not any(running.is_call or running.thread in others for running in list(_running)):
            try:
                _waiting.remove(each)
            except ValueError:  # another thread has taken it
                continue
            each[0]()


def current_state() -> PolicyTable | Off:
    """Return the active state of the calling thread or task."""
    value = get()
    return value.now or active_state(value)


_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def is_traced_unpatched() -> bool:
    """Return True if torch.compile traces this code while torch is not patched: no policy is active then.

    Dynamo cannot trace a ContextVar. Once torch is patched, hmp.core.compile has Dynamo replace this function by the constant False.
    """
    return _compiling()


def current_policy() -> Any:
    """Return the policy of the calling thread or task, None if nothing is cast."""
    return None if _compiling() else current_state().policy


def casts_enabled() -> bool:
    """Return True if ops that the calling thread or task calls now are cast.

    Returns:
        True if a policy is active and casts are not switched off.

    Example:
        >>> with hmp.casts("habana"):
        ...     hmp.casts_enabled()
        True
        >>> hmp.casts_enabled()
        False
    """
    return not _compiling() and current_state().policy is not None


def call_under(state: PolicyTable | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` while `state` is active, and return its result."""
    before = get()
    try:
        put(state)
        return function(*args, **kwargs)
    finally:
        put(before)  # the value, not the token: a token cannot be reset from another context


def call_without_casts(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` without casts, and return its result."""
    return call_under(current_state().off, function, *args, **kwargs)


# Returns what runs instead of a backward pass, for those who watch its Python; core.observe says how.
around_backward: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run  # noqa: E731


def call_in_backward(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function`, which runs a backward pass, and return its result: no list applies to user Python in it."""
    inside, call = current_state().in_backward, object()
    try:
        _calling_backward[call] = inside
        return call_under(inside, around_backward(function), *args, **kwargs)  # type: ignore[no-any-return]
    finally:
        _calling_backward.pop(call, None)


class UnderCapturedState:
    """A function that runs under the state that was active when this object was made, in any thread.

    For gradient checkpointing and closures of optimizers. A call raises HmpError if the policy has changed since then: a recomputation
    would have other numbers than its forward.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.state = current_state()
        self.policy = self.state.policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function under the state."""
        state = self.state
        if self.policy is None:
            state = state if state.policy is None else state.off
        elif state.policy != self.policy:
            since = "revert()" if state.policy is None else f"convert() to {state.policy.name!r}"
            raise HmpError(
                f"expected policy {self.policy.name!r}, under which this code ran forward, but it runs again after {since} (gradient "
                "checkpointing recomputes it); call backward() before you change the policy"
            )
        outermost = None if state.policy is None else begin_outermost()
        try:
            return call_under(state, self.function, *args, **kwargs)
        finally:
            if outermost is not None:
                outermost.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)
