"""Makes a PolicyTable of a Policy, and patches torch for it.

First what the policy does with each torch function that it changes, then the table of wrappers. Equal policies share one table.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import copies, dispatching_ops, lists, locks, observe, user_ops
from .active import state
from .active.state import PROCESS, PolicyTable
from .casting import dtype_name, each_tensor
from .lists import ListKind
from .log import caller, log, should_log
from .observe import Call, Listener
from .ops import sites
from .ops.python_ops import calling
from .ops.sites import Site
from .ops.table import DTYPE_OPS, FORWARDERS, STRUCTURE
from .patching import names, patches
from .policy.entries import EVERY_OP, ListEntry
from .policy.names import user_site, with_relatives
from .policy.policy import Policy
from .policy.precedence import Listed
from .rules import emulation, registry
from .rules.op import OpUnderRule
from .rules.registry import op_wrap
from .torch_patches import backward, imports, module_calls, modules, uncast

# --- what a policy does with each function --------------------------------------------------------------------------------


class Decision(NamedTuple):
    """What a policy does with one torch function."""

    ruled: OpUnderRule
    sites: tuple[Site, ...]  # all places of the function
    source: ListEntry | None = None  # the entry that it comes from; None for a rule without a list
    is_listed: bool = False  # on any list

    @property
    def original(self) -> Callable[..., Any]:
        """Return the function."""
        return self.sites[0].original

    @property
    def is_forwarder(self) -> bool:
        """Return True for a Python function of torch's that only calls a builtin, which is patched instead."""
        function = self.original
        of_torch = isinstance(function, types.FunctionType) and function.__module__ == "torch.nn.functional"
        return of_torch and self.sites[0].op in FORWARDERS


def decide(policy: Policy) -> Mapping[Any, Decision]:
    """Torch's function → decision, for all that the policy changes, users' functions included. The others already do as the rules ask."""
    dotted = [(name, entry) for name, entry in _dotted(policy) if not sites.sites_of(name)]
    registered = tuple(user_ops.registered())
    if not dotted and not registered:
        return _of_torch(policy)
    found = _of_ops(policy).copy()
    for name, source in dotted:
        # one op: what a user's function calls inside is not cast again. Not cached: the name may be bound to another function later
        site = user_site(name)
        _add(found, site, registry.user_rule(site.original, name, source.list_name, policy.dtype), source)
    for site, list_name in registered:
        if site.original not in found:
            _add(found, site, registry.user_rule(site.original, site.op, list_name, policy.dtype))
    return _with_composites(found, policy)


def _dotted(policy: Policy) -> Iterator[tuple[str, ListEntry]]:
    """Yield the entries of the lists that may be users' functions."""
    for list_name in lists.for_functions():
        if any("." in name for name in getattr(policy, list_name)):
            yield from ((name, entry) for name, entry in policy.casts_by_op(list_name).items() if "." in name)


@functools.partial(sites.cached, most=16)  # some hundred kilobytes each
def _of_torch(policy: Policy) -> Mapping[Any, Decision]:
    """Return what the policy does with torch's own functions."""
    return _with_composites(_of_ops(policy).copy(), policy)


def _with_composites(found: dict[Any, Decision], policy: Policy) -> dict[Any, Decision]:
    """Return `found`, with torch's Python functions that call a listed op added: each is one op, inside which nothing is cast."""
    for site in calling({site.attribute for d in found.values() if d.is_listed for site in d.sites}, found):
        _add(found, site, registry.op_rule(site, registry.COMPOSITE, policy.dtype))
    return found


@functools.partial(sites.cached, most=16)
def _of_ops(policy: Policy) -> dict[Any, Decision]:
    """Return what the policy does with torch's own ops, without the functions that only call such ops (see `_with_composites`)."""
    listed = Listed(policy)
    found: dict[Any, Decision] = {}
    for op in _candidates(listed):
        source = listed.entry(op)
        if op in DTYPE_OPS or (op in STRUCTURE and source is None):
            continue
        rule = registry.rule_for(op, source, policy.dtype)
        if rule is None or rule is registry.VIEW:
            continue
        for site in (site for name in (op, *sites.namesakes(op)) for site in sites.sites_of(name)):
            if site.is_private and source is None and op not in FORWARDERS:
                continue  # left to torch, which raises
            ruled = registry.op_rule(site, rule, policy.dtype)
            if source is not None and lists.kind_of(source.list_name).rule is rule:
                ruled = _with_words(ruled, lists.kind_of(source.list_name), policy)
            _add(found, site, ruled, source if rule.is_list else None)
    for added in lists.adding():
        if listed.by_list[added.name]:
            _add_list(found, listed, policy, added)
    return found


def _add_list(found: dict[Any, Decision], listed: Listed, policy: Policy, kind: ListKind) -> None:
    """Have done what a list adds to whatever else is done with its ops."""
    named = listed.by_list[kind.name].keys()
    every_op = sites.starred if kind.every_op is None else kind.every_op
    for op in dict.fromkeys(with_relatives((*(named - {EVERY_OP}), *(every_op() if EVERY_OP in named else ())))):
        entry = listed.added(kind.name, op)
        for site in sites.sites_of(op) if entry is not None and op not in DTYPE_OPS else ():
            known = found.get(site.original) or Decision(registry.op_rule(site, kind.rule, policy.dtype), (site,), entry)
            if kind not in known.ruled.added:
                ruled = _with_words(known.ruled, kind, policy)._replace(added=(*known.ruled.added, kind))
                found[site.original] = known._replace(ruled=ruled, is_listed=True)
            elif site not in known.sites:
                found[site.original] = known._replace(sites=(*known.sites, site))


def _candidates(listed: Listed) -> Iterable[str]:
    """Return the ids of all ops that may need a wrapper under a policy with these lists."""
    named = [name for table in listed.by_list.values() for name in table if name != EVERY_OP]
    unlisted = [name for rule in registry.RULES for name in sorted(rule.ops)]  # of ops that are one function the first one's rule counts
    return dict.fromkeys((*with_relatives(named), *with_relatives(unlisted), *(sites.starred() if listed.star is not None else ())))


def _with_words(ruled: OpUnderRule, kind: ListKind, policy: Policy) -> OpUnderRule:
    """Return the op under its rule with what the policy says in the one-word files of a list."""
    words = {**dict(ruled.words), **{word.field: getattr(policy, word.field) for word in kind.words}}
    return ruled._replace(words=tuple(words.items()))


def _add(found: dict[Any, Decision], site: Site, ruled: OpUnderRule, source: ListEntry | None = None) -> None:
    # one function may have several sites: torch.conv2d is F.conv2d, torch.dsmm is torch.mm
    known = found.get(site.original)
    if known is None:
        found[site.original] = Decision(ruled, (site,), source, source is not None)
    elif site not in known.sites:
        found[site.original] = known._replace(sites=(*known.sites, site))


@functools.partial(sites.cached, most=8192)
def _wrapper(original: Callable[..., Any], ruled: OpUnderRule) -> Callable[..., Any]:
    """Return what is called instead of the function: one for all policies with this decision, because it remembers what failed."""
    return op_wrap(original, ruled)


def _replacements(decisions: Mapping[Any, Decision], listeners: Sequence[Listener] = ()) -> state.Replacements:
    """Torch's function → its wrapper, for these decisions. With listeners, the wrappers are new."""

    def make(original: Any) -> Callable[..., Any]:
        ruled = decisions[original].ruled
        return op_wrap(original, ruled, listeners) if listeners else _wrapper(original, ruled)

    return state.Replacements(decisions.keys(), make)


# --- tables ---------------------------------------------------------------------------------------------------------------

lock = locks.RLock()
when_patched: list[Callable[[], None]] = []  # called once torch's ops are patched
when_decided_anew: list[Callable[[], None]] = []  # called when what was made of decisions is to be made again

# How many policy tables are kept, also where nothing uses them: those of contexts that are entered in a loop.
MOST = 32
# All that modules, handles and contexts refer to → whether their decisions are logged.
_alive: weakref.WeakKeyDictionary[PolicyTable, bool] = weakref.WeakKeyDictionary()
# They know what they have logged. The wrappers of their policy keep them alive.
_logs: weakref.WeakValueDictionary[Policy, VerboseLog] = weakref.WeakValueDictionary()


def table_of(policy: Policy, is_verbose: bool = False) -> PolicyTable:
    """Return the table of `policy`; all torch functions that it changes are patched."""
    while (found := _shared(policy, is_verbose)).policy is None:  # empty_all() was called while it was made
        _shared.cache_clear()
    return found


@functools.lru_cache(MOST)
def _shared(policy: Policy, is_verbose: bool) -> PolicyTable:
    for list_name in policy.lists:
        lists.kind_of(list_name).needs()
    with lock, gc_paused():
        return _tracked(_built(policy, is_verbose), is_verbose)


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


def patch_around_calls() -> None:
    """Patch what only a policy outside of the calls of models would cast: the construction of modules, initialisers, pruning."""
    with lock, gc_paused():
        uncast.install_around_calls()
        names.replace_references()


def rebuild_all() -> None:
    """Build all policies again, in the same objects, after a change of the registered functions or of those that listen."""
    with lock, gc_paused():
        if not patches.installed():
            return
        fresh: dict[tuple[Policy, bool], PolicyTable] = {}
        for table, is_verbose in list(_alive.items()):
            if table.policy is not None:
                key = table.policy, is_verbose
                if key not in fresh:
                    fresh[key] = _built(*key)
                table.replacements = fresh[key].replacements
        PROCESS.replacements = state.process_table.replacements


observe.rebuild = rebuild_all


def decide_anew() -> None:
    """Decide and build all again: ops have been replaced by functions since, or their wrappers are to compute in another way."""
    caches: tuple[Any, ...] = (_of_torch, _of_ops, _wrapper)
    for each in caches:
        each.cache_clear()
    if patches.installed():
        state.DTYPE_REPAIRS = _dtype_repairs()
        rebuild_all()
        for call in when_decided_anew:
            call()


def empty_all() -> None:
    """Empty all policy tables: threads that are still inside a context run torch's own ops from now on."""
    for table in list(_alive):
        table.replacements, table.policy, table.user_policy = state.NO_REPLACEMENTS, None, None
    _alive.clear()
    _shared.cache_clear()
    _logs.clear()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager without garbage collections: each would visit all objects of torch, and making tables makes little garbage."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


def _built(policy: Policy, is_verbose: bool) -> PolicyTable:
    """Return a new table of the policy, and torch patched for it. Leaves torch unpatched where it was and this raises."""
    emulation.computed_in_float32()  # raises for a wrong HMP_LOW_KERNELS, before torch is patched
    is_first = not patches.installed()
    if is_first:
        sites.forget()  # other code may have patched torch
    decisions = patched_by(policy)
    listeners = (_logs.setdefault(policy, VerboseLog()), *observe.listeners) if is_verbose else observe.listeners
    table = PolicyTable(_replacements(decisions, listeners), policy)
    try:
        if is_first:
            _patch_around_ops()
        dispatching_ops.install(site for decision in decisions.values() for site in decision.sites)
        for call in when_patched if is_first else ():
            call()
        names.replace_references()
    except BaseException:
        if is_first:
            patches.restore()
        raise
    return table


def patched_by(policy: Policy) -> dict[Any, Decision]:
    """Return the decisions whose functions are patched."""
    return {original: each for original, each in decide(policy).items() if not each.is_forwarder}


def _patch_around_ops() -> None:
    imports.fill_tables()
    uncast.install()
    backward.install()
    modules.install()
    module_calls.install()
    patches.on_restore(copies.clear_cache)
    dispatching_ops.follow_graphs()
    state.DTYPE_REPAIRS = _dtype_repairs()
    patches.on_restore(_forget_replacements)
    patches.on_restore(sites.forget)


def _dtype_repairs() -> state.Replacements:
    """Torch's function → its wrapper where no list applies: for the ops that torch may refuse to run, and no others."""
    return _replacements({original: d for original, d in _of_ops(Policy("no lists")).items() if d.ruled.rule.applies_in_backward})


def _forget_replacements() -> None:
    state.DTYPE_REPAIRS = state.NO_REPLACEMENTS
    state.NO_REPLACEMENTS.clear()  # it has met functions, which it would keep alive


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
    for list_name in ("bf16", "fp32"):
        log.info("  %s: %s", list_name, ", ".join(policy.entries(list_name)))


class VerboseLog(Listener):
    """Logs each distinct decision once: op, place of the call, input dtypes, what was cast to what."""

    measures = lists_casts = True

    def __init__(self) -> None:
        self._said: set[tuple[Any, ...]] = set()

    def end(self, call: Call) -> None:
        """Log the decision where it is a new one."""
        ruled = call.ruled
        inputs = tuple(tensor.dtype for tensor in each_tensor(call.given))
        if not inputs or ruled is None or ruled.rule is registry.COMPOSITE:
            return
        place = "{}:{}".format(*caller())
        decision = (ruled.op, place, inputs, tuple(call.cast_dtypes))
        if decision not in self._said and should_log():
            self._said.add(decision)
            casts = ", ".join(dict.fromkeys(f"{dtype_name(a)} -> {dtype_name(b)}" for a, b in call.cast_dtypes)) or "nothing to cast"
            log.info("%s (%s) at %s: inputs %s: %s", ruled.op, ruled.rule, place, ", ".join(map(dtype_name, inputs)), casts)
