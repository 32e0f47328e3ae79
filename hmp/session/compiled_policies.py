"""Makes a CompiledPolicy of a Policy, and patches torch for it.

It is kept while a handle, a region or a module's mark holds it; the last few stay for their next use.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator

from .. import fork_safe
from ..caches import cast_cache
from ..context import CompiledPolicy, state
from ..dispatch import deciding, dispatchers, fx_interpreter, placement
from ..lists import Policy
from ..patching import cache, patches
from ..torch_compile import bridge
from ..torch_hooks import (
    autocast,
    backward,
    checkpoint,
    dispatch_modes,
    module_construction,
    module_state,
    modules,
    never_cast,
    optimizers,
    override_tables,
)
from ..wrapping import Observer, Observers, copied_views, jit_trace
from .log_observer import LogObserver

lock = fork_safe.RLock()
observers: list[Observer] = []

# How many compiled policies are kept although nothing uses them: a region that is entered in a loop finds its own again.
MOST = 32
_casts: weakref.WeakValueDictionary[tuple[Policy, bool], CompiledPolicy] = weakref.WeakValueDictionary()
_latest: OrderedDict[int, CompiledPolicy] = OrderedDict()  # by id, least recently used first
# All that are in use, with whether their decisions are logged: marks, handles and regions hold them.
_alive: weakref.WeakKeyDictionary[CompiledPolicy, bool] = weakref.WeakKeyDictionary()
# They know what they have said. The tables of their policy hold them.
_log_observers: weakref.WeakValueDictionary[Policy, LogObserver] = weakref.WeakValueDictionary()


def compile_policy(policy: Policy, is_verbose: bool = False, for_process: bool = False) -> CompiledPolicy:
    """The compiled `policy`; dispatchers stand in the place of every torch function that it changes. With `for_process` the caller puts it
    in force for the process next, and writes the dispatchers for it then."""
    found = _casts.get((policy, is_verbose))
    if found is None:
        with lock:
            found = _casts.get((policy, is_verbose))
            if found is None:
                with gc_paused():
                    found = _casts[policy, is_verbose] = _noted(_made(policy, is_verbose), is_verbose)
                    if not for_process:
                        dispatchers.respecialise()
    _keep(found)
    return found


def compile_for_scope(given: Policy, policy: Policy, scope_id: int, is_verbose: bool = False) -> CompiledPolicy:
    """The compiled `policy`, which is what the policy `given` becomes in some modules of a model; a new object, for this scope alone."""
    shared = compile_policy(policy, is_verbose)
    # its own policy, which may be equal to another one and have other lines
    return _noted(CompiledPolicy(shared.table, policy, shared.fast_paths, given, scope_id), is_verbose)


def _noted(casts: CompiledPolicy, is_verbose: bool) -> CompiledPolicy:
    _alive[casts] = is_verbose
    return casts


def _keep(casts: CompiledPolicy) -> None:
    # one step at a time, each of which is atomic: other threads do the same, and the lock is held for as long as a conversion takes
    _latest[id(casts)] = casts
    with contextlib.suppress(KeyError):
        _latest.move_to_end(id(casts))
        while len(_latest) > MOST:
            _latest.popitem(last=False)


def make_again() -> None:
    """Makes the tables of all compiled policies anew: what is registered, or who observes, has changed."""
    fresh: dict[tuple[Policy, bool], CompiledPolicy] = {}
    for casts, is_verbose in list(_alive.items()):
        if casts.policy is not None:
            made = fresh.get((casts.policy, is_verbose))
            if made is None:
                made = fresh[casts.policy, is_verbose] = _made(casts.policy, is_verbose)
            casts.table, casts.fast_paths = made.table, made.fast_paths


def put_out_of_force() -> None:
    """Empties all compiled policies: threads that are still inside a region run torch's own ops from now on."""
    for casts in list(_alive):
        casts.table, casts.policy, casts.fast_paths, casts.given = state.NOTHING, None, state.NOTHING, None
    _alive.clear()
    _casts.clear()
    _latest.clear()
    _log_observers.clear()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """A stretch without garbage collections: each would go through all of torch, and little of what is made here is garbage."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


# What is put in place before the first op is, in this order.
_HOOKS = (
    never_cast, optimizers, checkpoint, backward, dispatch_modes, modules, module_state, module_construction, copied_views, jit_trace,
)  # fmt: skip


def _no_longer_repaired() -> None:
    state.DTYPE_REPAIRS = state.NOTHING


def _made(policy: Policy, is_verbose: bool) -> CompiledPolicy:
    """The policy, newly compiled, with dispatchers in place for it. If that fails, torch is patched as it was before."""
    fresh = not patches.installed()
    if fresh:
        cache.forget()  # somebody else may have patched torch since
    decisions = deciding.dispatched(deciding.decide(policy))
    told = [*([_log_observers.setdefault(policy, LogObserver())] if is_verbose else []), *observers]
    casts = CompiledPolicy(
        deciding.build(decisions, Observers(told) if told else None),
        policy,
        {} if told else deciding.fast_paths(decisions),  # an observer is told of every call
    )
    try:
        if fresh:
            override_tables.fill()
            for hooks in _HOOKS:
                hooks.install()
            patches.on_restore(cast_cache.revert)
            fx_interpreter.follow()
            state.DTYPE_REPAIRS = deciding.dtype_repairs()
            patches.on_restore(_no_longer_repaired)
            patches.on_restore(cache.forget)
        placement.install(site for decision in decisions.values() for site in decision.sites)
        autocast.install()
        if fresh:
            bridge.put_in_place()
    except BaseException:
        if fresh:
            patches.restore()
        raise
    return casts
