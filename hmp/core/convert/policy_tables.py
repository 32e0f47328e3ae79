"""Makes a PolicyTable of a Policy, and patches torch for it. Equal policies share one: the MOST latest are kept."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from .. import copies, lists, locks, low_kernels, observe
from ..active import PolicyTable, state
from ..casting import each_tensor
from ..compile import dynamo_patches
from ..dispatch import decisions, placement
from ..formatting import dtype_name
from ..log import caller, log, should_log
from ..observe import Call, Listener
from ..patching import patches, references
from ..policy import Policy
from ..rules import rules
from ..torch_ops import Site, sites
from ..torch_patches import (
    backward,
    imports,
    module_calls,
    modules,
    uncast,
)

lock = locks.RLock()
when_patched: list[Callable[[], None]] = []  # is called once torch is patched
_was_used = False

# How many policy tables are kept, also where nothing uses them: those of contexts that are entered in a loop.
MOST = 32
_latest: OrderedDict[tuple[Policy, bool], PolicyTable] = OrderedDict()  # least recently used first
# All that modules, handles and contexts refer to → whether their decisions are logged.
_alive: weakref.WeakKeyDictionary[PolicyTable, bool] = weakref.WeakKeyDictionary()
# They know what they have logged. The wrappers of their policy keep them alive.
_logs: weakref.WeakValueDictionary[Policy, VerboseLog] = weakref.WeakValueDictionary()


def table_of(policy: Policy, is_verbose: bool = False) -> PolicyTable:
    """Return the table of `policy`; all torch functions that it changes are patched."""
    key = policy, is_verbose
    found = _latest.get(key)
    if found is None:
        for cast in policy.lists:
            lists.kind_of(cast).needs()
        with lock:
            found = _latest.get(key)
            if found is None:
                with gc_paused():
                    found = _tracked(_built(policy, is_verbose), is_verbose)
    _keep(key, found)
    return found


def patch_around_calls() -> None:
    """Patch what only a policy outside of the calls of models would cast: the construction of modules, initialisers, pruning."""
    with lock, gc_paused():
        uncast.install_around_calls()
        references.replace_references()


def any_policy_used() -> bool:
    """Return True if a policy has been active in this process, or was about to be."""
    return _was_used


def scoped_table(user_policy: Policy, policy: Policy, scope_id: int, is_verbose: bool = False) -> PolicyTable:
    """Return the table of `policy`, which is what `user_policy` becomes in some modules of a model.

    A new object, not shared between scopes.
    """
    shared = table_of(policy, is_verbose)
    # `policy` itself: an equal one may come from other files and lines
    return _tracked(PolicyTable(shared.replacements, policy, user_policy, scope_id), is_verbose)


def _tracked(table: PolicyTable, is_verbose: bool) -> PolicyTable:
    _alive[table] = is_verbose
    return table


def _keep(key: tuple[Policy, bool], table: PolicyTable) -> None:
    # other threads do this too: every step is atomic, because the lock may be held for as long as a conversion takes
    _latest[key] = table
    with contextlib.suppress(KeyError):
        _latest.move_to_end(key)
        while len(_latest) > MOST:
            _latest.popitem(last=False)


def rebuild_all() -> None:
    """Build all policies again, in the same objects, after a change of the registered functions or of those that listen."""
    fresh: dict[tuple[Policy, bool], PolicyTable] = {}
    for table, is_verbose in list(_alive.items()):
        if table.policy is not None:
            made = fresh.get((table.policy, is_verbose))
            if made is None:
                made = fresh[table.policy, is_verbose] = _built(table.policy, is_verbose)
            table.replacements = made.replacements


def empty_all() -> None:
    """Empty all policy tables: threads that are still inside a context run torch's own ops from now on."""
    for table in list(_alive):
        table.replacements, table.policy, table.user_policy = state.NO_REPLACEMENTS, None, None
    _alive.clear()
    _latest.clear()
    _logs.clear()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager without garbage collections: each would visit all objects of torch, and compiling makes little garbage."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


# What is patched before the first op is, in this order.
_HOOKS = (
    uncast, backward, modules, module_calls,
)  # fmt: skip


def _forget_replacements() -> None:
    state.DTYPE_REPAIRS = state.NO_REPLACEMENTS
    state.NO_REPLACEMENTS.clear()  # it has met functions, which it would keep alive


def _built(policy: Policy, is_verbose: bool) -> PolicyTable:
    """Return a new table of the policy, and torch patched for it. Leaves torch unpatched where it was and this raises."""
    global _was_used
    low_kernels.computed_in_float32()  # raises for a wrong HMP_LOW_KERNELS, before torch is patched
    _was_used = True
    is_first = not patches.installed()
    if is_first:
        sites.forget()  # other code may have patched torch
    patched = decisions.to_patch(decisions.decide(policy))
    sites_to_patch: list[Site] = []
    told = (_logs.setdefault(policy, VerboseLog()), *observe.listeners) if is_verbose else observe.listeners
    table = PolicyTable(decisions.replacements(patched, told), policy)
    try:
        if is_first:
            imports.fill_tables()
            for hooks in _HOOKS:
                hooks.install()
            patches.on_restore(copies.clear_cache)
            placement.follow_graphs()
            state.DTYPE_REPAIRS = decisions.dtype_repairs()
            patches.on_restore(_forget_replacements)
            patches.on_restore(sites.forget)
        for decision in patched.values():
            sites_to_patch += decision.sites
        placement.install(sites_to_patch)
        if is_first:
            dynamo_patches.install()
        references.replace_references()
        if is_first:
            for call in when_patched:
                call()
    except BaseException:
        if is_first:
            patches.restore()
        raise
    return table


# --- what `convert(isVerbose=True)` logs: the policy, then every distinct decision once, through the logger `hmp` ------------


def announce(policy: Policy) -> None:
    """Log the policy that became active, and give the logger a handler on stderr if it has none."""
    if not should_log():
        return
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hmp: %(message)s"))
        log.addHandler(handler)
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    log.info("%s", policy)
    for cast in ("bf16", "fp32"):
        log.info("  %s: %s", cast, ", ".join(policy.entries(cast)))


class VerboseLog(Listener):
    """Logs each distinct decision once: op, place of the call, input dtypes, what was cast to what."""

    measures = lists_casts = True

    def __init__(self) -> None:
        self._said: set[tuple[Any, ...]] = set()
        self._lock = locks.RLock()

    def end(self, call: Call) -> None:
        """Log the decision where it is a new one."""
        rule = call.rule
        inputs = tuple(tensor.dtype for tensor in each_tensor(call.given))
        if not inputs or rule is None or rule.kind is rules.ONE_OP:
            return
        place = "{}:{}".format(*caller())
        decision = (rule.op, place, inputs, tuple(call.cast_dtypes))
        with self._lock:
            if decision in self._said:
                return
            self._said.add(decision)
        if should_log():
            casts = ", ".join(dict.fromkeys(f"{dtype_name(a)} -> {dtype_name(b)}" for a, b in call.cast_dtypes)) or "nothing to cast"
            log.info("%s (%s) at %s: inputs %s: %s", rule.op, rule.kind, place, ", ".join(map(dtype_name, inputs)), casts)
