"""convert(), casts() and apply(): a policy comes into force for the process, a region, or a module's calls."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import (
    applied,
    as_found,
    compile_bridge,
    construction,
    fx_graphs,
    in_flight,
    install,
    jit_trace,
    module_state,
    names_taken,
    patches,
    plumbing,
    registry,
    state,
    switches,
    tables,
    torch_autocast,
    views,
)
from .call_rules import Observer, Observers
from .errors import HmpError
from .policy import DEFAULT, Policy, as_policy
from .rules import Cast
from .state import PROCESS, Casts, Region
from .unreachable import tell_unreachable
from .verbose import LogObserver, announce

M = TypeVar("M", bound=torch.nn.Module)

_lock = threading.RLock()
# The casts of each policy that was in force since torch was last untouched.
_casts: dict[tuple[Policy, bool], Casts] = {}


class Handle:
    """What `convert()` gives back: leaving its `with`, or `.revert()`, restores the policy that was in force before it."""

    def __init__(self, policy: Policy, is_verbose: bool) -> None:
        self._policy = policy
        self._is_verbose = is_verbose

    def revert(self) -> None:
        """Restores the policy that was in force before the conversion, whatever came after it; a second call does nothing."""
        with _lock:
            if self not in _converted:
                return
            del _converted[_converted.index(self) :]
            if _converted or applied.any_marked() or _regions_entered:
                _put_in_force()
            else:
                revert()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.revert()


# The conversions that no handle has taken back, latest last; that one's policy is in force.
_converted: list[Handle] = []
_regions_entered = False


def convert(
    opt_level: str = "O1",
    bf16_file_path: str | Path = "",
    fp32_file_path: str | Path = "",
    isVerbose: bool = False,
    *,
    promote_file_path: str | Path = "",
    policy: Policy | str | Path | None = None,
    dtype: Any = None,
    verbose: bool | None = None,
) -> Handle:
    """Puts a policy in force for the whole process, and gives back a handle that restores the one before.

    "" means the default list of that kind (Habana's). `opt_level` "O2" runs matrix products and convolutions in the low dtype
    and every other op in float32, whatever files are named. `policy` takes a Policy, a preset's name or a folder, and excludes
    the paths; `dtype` is the low dtype, torch.bfloat16 unless the policy says otherwise. `isVerbose` (or `verbose`) logs the
    policy, what `unreachable()` lists, and every distinct decision once. A second call replaces the policy. Raises OpListError
    for lists that cannot be used and HmpError for other wrong arguments; torch is then as it was before.
    """
    chosen = _choose_policy(opt_level, bf16_file_path, fp32_file_path, promote_file_path, policy)
    if dtype is not None:
        chosen = chosen.replace(dtype=dtype)
    is_verbose = isVerbose if verbose is None else verbose
    with _lock, _uncollected():
        was_patched = patches.installed()
        _casts_of(chosen, is_verbose, for_process=True)  # whatever fails, fails here
        if not was_patched:
            in_flight.wait_for(plumbing.codes())
        handle = Handle(chosen, is_verbose)
        _converted.append(handle)
        _put_in_force()
        torch_autocast.say_if_enabled()
        if is_verbose:
            announce(chosen)
            tell_unreachable()
        return handle


def _choose_policy(opt_level: str, bf16: str | Path, fp32: str | Path, promote: str | Path, policy: Policy | str | Path | None) -> Policy:
    if opt_level not in ("O1", "O2"):
        raise HmpError(f"opt_level {opt_level!r} is unknown; use 'O1' (the lists) or 'O2' (products in the low dtype, the rest in float32)")
    if policy is not None:
        if str(bf16) or str(fp32) or str(promote):
            raise HmpError("policy= and list files exclude each other; give one of them, or Policy.from_files(...)")
        return as_policy(policy)
    if opt_level == "O2":
        return as_policy("habana-o2")
    if not (str(bf16) or str(fp32) or str(promote)):
        return as_policy(DEFAULT)
    return Policy.from_files(bf16, fp32, promote)


def revert() -> None:
    """Leaves torch as it was found: no policy in force, nothing patched, no model applied to. Does nothing without convert()."""
    global _regions_entered
    with _lock:
        _converted.clear()
        _follow(Casts(state.NOTHING, None))  # whoever holds a switch calls torch's own op from now on
        for casts in _casts.values():
            # threads that are still inside a region of theirs: plain torch from now on
            casts.table, casts.policy, casts.looks = state.NOTHING, None, state.NOTHING
        _casts.clear()
        _log_observers.clear()
        applied.unmark_all()
        _regions_entered = False
        stood = install.standing_switches()
        patches.restore()
        names_taken.give_back(stood)


def is_converted() -> bool:
    """Whether a process-wide policy is in force."""
    return PROCESS.policy is not None


def casts(policy: Policy | str | Path | Callable[..., Any] = DEFAULT) -> Any:
    """A region of the calling thread or task in which `policy` is in force: context manager and decorator; nests.

    The patches that it needs stay, doing nothing elsewhere, until `hmp.revert()`.
    """
    if torch.compiler.is_dynamo_compiling():
        _refuse_tracing()
    if isinstance(policy, (types.FunctionType, types.MethodType)):
        return casts()(policy)
    chosen = _uncompiled(as_policy)(policy)

    def choose(_: object) -> Casts:
        global _regions_entered
        _regions_entered = True
        if torch.compiler.is_dynamo_compiling():
            _refuse_tracing()
        casts = _quick(_uncompiled(_casts_of)(chosen))
        torch_autocast.say_if_enabled()
        return casts

    return Region(f"casts({chosen.name!r})", choose, brings_casts=True)


def _refuse_tracing() -> None:
    """Ends a compilation that meets hmp in place nowhere, where its bridge would stand for this code: the frame runs as it is then."""
    raise HmpError("the first hmp.casts() of a process cannot be compiled; call hmp.convert() or enter hmp.casts() once before")


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch.compile leaves alone with all that it calls, while hmp's bridge does not see to that."""
    dynamo = sys.modules.get("torch._dynamo")
    return function if dynamo is None or patches.installed() else dynamo.disable(function)


def apply(model: M, policy: Policy | str | Path = DEFAULT) -> M:
    """`model`, whose every call runs under `policy` from now on; nothing outside its calls is cast.

    Works through `model(...)`, not through a direct `model.forward(...)`. A deep copy of the model is applied to as well;
    a pickle of it takes no policy along. `hmp.remove(model)` undoes it; the patches, doing nothing elsewhere, stay
    until `hmp.revert()`.
    """
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"apply() takes a torch.nn.Module; {type(model).__name__} is none. To decorate functions use hmp.casts(policy)")
    if isinstance(model, torch.jit.ScriptModule):
        raise HmpError("apply() cannot reach into a scripted module, which is compiled; apply the policy to the module it was made of")
    chosen = as_policy(policy)
    with _lock:
        applied.mark(model, _quick(_casts_of(chosen)))
    return model


def remove(model: M) -> M:
    """`model`, no longer applied to."""
    with _lock:
        applied.unmark(model)
    return model


def register(owner: Any, name: str, cast: Cast) -> None:
    """Makes `owner.name`, a function of the user's, an op on the "bf16", "fp32" or "promote" list, under every policy."""
    with _lock:
        registry.add(owner, name, cast)
        _make_again()


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """A stretch in which `observer` sees every decision, of every policy and in every thread. What is not observed has no cost."""
    with _lock:
        _observers.append(observer)
        _make_again()
    try:
        yield
    finally:
        with _lock:
            _observers.remove(observer)
            _make_again()


_observers: list[Observer] = []
_log_observers: dict[Policy, LogObserver] = {}  # they know what they have said


def _make_again() -> None:
    """Has every policy that is in use cast by what is registered and observed now."""
    if patches.installed():
        with _uncollected():
            for (policy, is_verbose), casts in _casts.items():
                fresh = _made(policy, is_verbose)
                casts.table, casts.looks = fresh.table, fresh.looks
            _put_in_force()


def _put_in_force() -> None:
    """Has PROCESS follow the latest conversion."""
    if _converted:
        latest = _converted[-1]
        _follow(_casts_of(latest._policy, latest._is_verbose))
    else:
        _follow(Casts(state.NOTHING, None))


def _follow(casts: Casts) -> None:
    """Has PROCESS and the switches be as `casts` are, so that each op of each thread runs under what was in force or under `casts`.

    A builtin is one decision. A Python function of many is one because casts are off inside it (R8), where its table holds it: so
    while there are other threads, such functions have casts off inside before anything casts, and until nothing does.
    """
    old = PROCESS
    if not in_flight.alone():
        quiet = _quiet(casts.table.keys() - old.table.keys())
        if quiet:
            _be(Casts({**old.table, **quiet}, old.policy, old.looks))
            in_flight.wait_for({patches.code_of(function) for function in quiet})
        quiet = _quiet(old.table.keys() - casts.table.keys())
        if quiet:
            _be(Casts({**quiet, **casts.table}, casts.policy, casts.looks))
    _be(casts)


def _quiet(functions: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """A table for those that are written in Python: they run as torch has them, and casts are off inside."""
    return {f: state.without_casts(patches.plain(f)) for f in functions if isinstance(f, types.FunctionType)}


def _be(casts: Casts) -> None:
    PROCESS.table, PROCESS.policy, PROCESS.looks = casts.table, casts.policy, casts.looks
    switches.focus(PROCESS)


def _casts_of(policy: Policy, is_verbose: bool = False, for_process: bool = False) -> Casts:
    """The casts of `policy`, its sites under hmp. `for_process` is whether switches hear of them next."""
    found = _casts.get((policy, is_verbose))
    if found is not None:
        return found
    with _lock:
        if (policy, is_verbose) not in _casts:
            with _uncollected():
                _casts[(policy, is_verbose)] = _made(policy, is_verbose)
                if not for_process:
                    switches.renew()
        return _casts[(policy, is_verbose)]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collections, each of which goes through all of torch: much is made here, and nearly nothing of it is garbage."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _quick(casts: Casts) -> Casts:
    """`casts`, which the switches are made for unless there are others that they are made for."""
    if not switches.is_focused():
        with _lock:
            switches.focus(casts)
    return casts


def _no_longer_made_to_fit() -> None:
    state.MADE_TO_FIT = state.NOTHING


def _made(policy: Policy, is_verbose: bool) -> Casts:
    """The policy's casts; its sites are patched on return. Whatever fails, fails before torch is touched."""
    decisions = tables.switched(tables.decide(policy))
    observers = [*([_log_observers.setdefault(policy, LogObserver())] if is_verbose else []), *_observers]
    casts = Casts(
        tables.build(decisions, Observers(observers) if observers else None),
        policy,
        {} if observers else tables.looks(decisions),  # an observer is told of every call
    )
    fresh = not patches.installed()
    try:
        if fresh:
            plumbing.install()
            module_state.install()
            construction.install()
            views.install()
            jit_trace.install()
            fx_graphs.follow()
            state.MADE_TO_FIT = tables.MadeToFit()
            patches.on_restore(_no_longer_made_to_fit)
            patches.on_restore(as_found.forget_foreign)
        install.install(site for decision in decisions.values() for site in decision.sites)
        torch_autocast.install()
        if fresh:
            compile_bridge.put_in_place()
    except BaseException:
        if fresh:
            patches.restore()
        raise
    return casts
