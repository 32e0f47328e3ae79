"""What a policy does with each torch function that it changes, and the function that is called in its place."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .. import low_kernels
from ..context import Replacements
from ..fp8 import PRODUCTS
from ..lists import CASTS, EVERY_OP, Listed, ListEntry, ListName, Policy, spelling
from ..ops import Site, calling, op_facts, parameters, sites
from ..patching import cache, patches
from ..saved import KEEPS
from ..wrapping import Kind, Observer, OpRule, kernel_fallback, norms_and_lookups, op_wrap, user_rule
from . import user_functions


class Decision:
    """What a policy does with one torch function: the rule that is applied, the list entry that it comes from (None for R5 to R12), and
    the sites where the function stands."""

    def __init__(self, sites: tuple[Site, ...], source: ListEntry | None, rule: OpRule) -> None:
        self.original = sites[0].original
        self.kind = rule.kind
        self.rule = rule
        self.source = source
        self.sites = sites
        self._made: tuple[object, frozenset[torch.dtype], Callable[..., Any]] | None = None

    def also_at(self, site: Site) -> Decision:
        """The decision for a function that stands at `site` too."""
        return Decision((*self.sites, site), self.source, self.rule)

    @property
    def wrapper(self) -> Callable[..., Any]:
        """What is called in the place of the function. Made once until torch is unpatched, for all policies with this decision: it
        remembers what failed (R11)."""
        made, slow = self._made, low_kernels.computed_in_float32()
        if made is None or made[0] is not patches.installation() or made[1] != slow:
            made = self._made = patches.installation(), slow, op_wrap(patches.unpatched(self.original), self.rule)
        return made[2]


def decide(policy: Policy) -> Mapping[Any, Decision]:
    """Torch's function → decision, for all that the policy changes, users' functions included. The others already do as the rules ask."""
    dotted = [(name, rule) for name, rule in _dotted(policy) if not sites.sites_of(name)]
    registered = tuple(user_functions.registered())
    if not dotted and not registered:
        return _of_torch(policy)
    found = _of_ops(policy).copy()
    for name, source in dotted:
        # one op: what a user's function calls inside is not cast again (R8). Not cached: the name may be bound to another function later
        site = spelling.user_site(name)
        _add(found, site, source.cast, policy.dtype, source, user_rule(site.original, name, source.cast, policy.dtype))
    for site, cast in registered:
        if site.original not in found:
            _add(found, site, cast, policy.dtype, None, user_rule(site.original, site.op, cast, policy.dtype))
    return _with_composites(found, policy)


def forget() -> None:
    """Decides anew: functions stand in the places of ops that did not when it was decided."""
    _of_torch.cache_clear()  # type: ignore[attr-defined]
    _of_ops.cache_clear()  # type: ignore[attr-defined]


def _dotted(policy: Policy) -> Iterator[tuple[str, ListEntry]]:
    """The entries of the lists that may be users' functions."""
    for cast in CASTS:
        if any("." in name for name in getattr(policy, cast)):
            yield from ((name, rule) for name, rule in policy.casts_by_op(cast).items() if "." in name)


@functools.partial(cache.cached, most=16)  # some hundred kilobytes each
def _of_torch(policy: Policy) -> Mapping[Any, Decision]:
    """What the policy does with torch's own functions."""
    return _with_composites(_of_ops(policy).copy(), policy)


def _with_composites(found: dict[Any, Decision], policy: Policy) -> dict[Any, Decision]:
    """`found`, with torch's Python functions that call one of these ops added: each is one op, inside which nothing is cast (R8)."""
    for site in calling({site.attribute for d in found.values() for site in d.sites}, found):
        _add(found, site, "inside", policy.dtype, None)
    return found


@functools.partial(cache.cached, most=16)
def _of_ops(policy: Policy) -> dict[Any, Decision]:
    """What the policy does with torch's own ops, without the functions that only call such ops (see `_with_composites`)."""
    listed = Listed(policy)
    found: dict[Any, Decision] = {}
    for op in _candidates(listed):
        source = listed.entry(op)
        if op in op_facts.DTYPE_OPS or (op in op_facts.STRUCTURE and source is None):
            continue
        for site in sites.sites_of(op):
            kind = _kind(site, None if source is None else source.cast, policy.dtype)
            if source is not None and kind == source.cast and source.is_autocasts:
                _add(found, site, "autocast", policy.dtype, source)
            elif kind == "fp8":
                rule = _op_rule(site, kind, policy.dtype)._replace(fp8=(policy.fp8_recipe, policy.fp8_kernel))
                _add(found, site, kind, policy.dtype, source, rule)
            elif kind is not None:
                is_listed = source is not None and kind == ("bf16" if source.cast == "fp8" else source.cast)
                _add(found, site, kind, policy.dtype, source if is_listed else None)
    if listed.by_cast["saved"]:
        _add_saved(found, listed, policy)
    return found


def _add_saved(found: dict[Any, Decision], listed: Listed, policy: Policy) -> None:
    """Has what the ops keep for backward packed, whatever else is done with them (R22)."""
    names = listed.by_cast["saved"].keys()
    for op in dict.fromkeys(_with_relatives((*(names - {EVERY_OP}), *(KEEPS if EVERY_OP in names else ())))):
        entry = listed.saves(op)
        for site in sites.sites_of(op) if entry is not None and op not in op_facts.DTYPE_OPS else ():
            known = found.get(site.original) or Decision((site,), entry, _op_rule(site, "saved", policy.dtype))
            if not known.rule.saved:
                found[site.original] = Decision(known.sites, known.source, known.rule._replace(saved=policy.saved_recipe))
            elif site not in known.sites:
                found[site.original] = known.also_at(site)


def _candidates(listed: Listed) -> Iterable[str]:
    """The ids of all ops that may need a wrapper under a policy with these lists."""
    facts = op_facts
    in_place = (*facts.MIXED_INPLACE_RAISES, *facts.MASK_TAKERS_INPLACE, *facts.FILLS, "mul", "multiply")
    return dict.fromkeys(
        (
            *_with_relatives(name for table in listed.by_cast.values() for name in table if name != EVERY_OP),
            *(facts.MIXED_RAISES | facts.MIXED_BACKWARD_RAISES | facts.NORMS),
            *(facts.FILLS | facts.GUARDED_ARITHMETIC | facts.GUARDED_IN_FLOAT16),
            *_with_relatives(name for _, _, names in (*facts.NO_KERNEL, *facts.NO_BACKWARD_KERNEL) for name in names),
            *facts.KERNEL_BY_ARGUMENTS,
            *(form for name in in_place for form in (name, name + "_", "i" + name)),
            *(sites.starred() if listed.star is not None else ()),
        )
    )


def _with_relatives(ops: Iterable[str]) -> Iterator[str]:
    return (each for op in ops for each in (op, *sites.relatives(op)))


def _add(
    found: dict[Any, Decision], site: Site, kind: Kind, low: torch.dtype, source: ListEntry | None, rule: OpRule | None = None
) -> None:
    # one function may have several sites: torch.conv2d is F.conv2d
    known = found.get(site.original)
    found[site.original] = Decision((site,), source, rule or _op_rule(site, kind, low)) if known is None else known.also_at(site)


# The kinds that answer mixed inputs (R5, R7) and missing kernels (R11), whatever the lists say.
_REPAIRS = frozenset({"first", "promote", "in_place", "no_kernel", "no_kernel_in_place"})


def dtype_repairs() -> Replacements:
    """Torch's function → its wrapper where no list applies: for the ops that torch may refuse to run, and no others (R7, R11)."""
    return replacements({original: d for original, d in _of_ops(Policy("no lists")).items() if d.kind in _REPAIRS})


def replacements(decisions: Mapping[Any, Decision], observer: Observer | None = None) -> Replacements:
    """Torch's function → its wrapper, for these decisions. With an observer the wrappers are new, and report to it."""

    def make(original: Any) -> Callable[..., Any]:
        decision = decisions[original]
        return decision.wrapper if observer is None else op_wrap(patches.unpatched(original), decision.rule, observer)

    return Replacements(decisions.keys(), make)


def to_patch(decisions: Mapping[Any, Decision]) -> dict[Any, Decision]:
    """The decisions whose functions are patched: all but torch's Python functions that only call a builtin, which is."""
    return {original: d for original, d in decisions.items() if not _forwards(original, d)}


def _forwards(original: Any, decision: Decision) -> bool:
    function = original if isinstance(original, types.FunctionType) else None
    return function is not None and function.__module__ == "torch.nn.functional" and decision.sites[0].op in op_facts.FORWARDERS


def _kind(site: Site, cast: ListName | None, low: torch.dtype) -> Kind | None:
    """What is done at a site whose op is on the list `cast`, or on none; None for nothing."""
    return _kind_in_place(site.op) if site.in_place else _kind_out_of_place(site.op, cast, low)


def _kind_in_place(op: str) -> Kind | None:
    """What is done for an in-place op, whatever list it is on: its result has the dtype of what it writes into (R5)."""
    base = sites.base_of(op)
    if base in op_facts.MIXED_INPLACE_RAISES or op in op_facts.MIXED_INPLACE_RAISES:
        return "in_place"
    if op in op_facts.MASK_TAKERS_INPLACE or (op != base and base in op_facts.MASK_TAKERS_INPLACE):
        return "mask_in_place"
    if base in op_facts.GUARDED_ARITHMETIC:
        return "guard_in_place"
    if kernel_fallback.known(sites.ancestry(op)):
        return "no_kernel_in_place"
    return "fill" if base in op_facts.FILLS else None


def _kind_out_of_place(op: str, cast: ListName | None, low: torch.dtype) -> Kind | None:
    if cast == "fp8":
        return "fp8" if op in PRODUCTS else "bf16"  # the name that an entry follows is a product, an alias of it need not be
    if cast in ("bf16", "fp32"):
        return cast
    if cast == "promote" and op not in op_facts.PROMOTED_WHOLLY:
        return cast
    if op in op_facts.FILLS:
        return "fill"
    if op in op_facts.GUARDED_ARITHMETIC or (low is torch.float16 and op in op_facts.GUARDED_IN_FLOAT16):
        return "guard"
    if cast is None and (op in op_facts.MIXED_RAISES or op in op_facts.NORMS):
        return "first"
    if cast is None and op in op_facts.MIXED_BACKWARD_RAISES:
        return "promote"
    line = sites.ancestry(op)
    if op in op_facts.KERNEL_BY_ARGUMENTS or kernel_fallback.known(line) or kernel_fallback.known(line, backward=True):
        return "no_kernel"
    return None


@cache.cached
def _op_rule(site: Site, kind: Kind, low: torch.dtype) -> OpRule:
    op, base, line = site.op, sites.base_of(site.op), sites.ancestry(site.op)
    needs_order = site.python or op in norms_and_lookups.BUILDERS or op in op_facts.KEPT_ARGUMENTS or kind == "first"
    order = parameters(site.original, op) if needs_order else ()
    kept = op_facts.KEPT_ARGUMENTS.get(op, frozenset())
    function = site.original if isinstance(site.original, types.FunctionType) else None
    unlisted = _kind(site, None, low) if kind == "autocast" else None
    return OpRule(
        op=op,
        kind=kind,
        low=low,
        keep=kept | {order.index(name) for name in kept if name in order},
        order=order,
        inplace_at=order.index("inplace") if function is not None and "inplace" in order else None,
        out_at=order.index("out") if function is not None and "out" in order else None,
        composite=function is not None,
        # of torch.nn.functional nothing is a view: F.unfold is not Tensor.unfold
        view=not (op_facts.GIVING_BACK if site.where == "torch.nn.functional" else op_facts.ALIASING).isdisjoint(line),
        join=op in op_facts.JOINS or op in op_facts.MIXED_BACKWARD_RAISES,  # where a 0-dim tensor counts (R3)
        score_taker=not op_facts.SCORE_TAKERS.isdisjoint(line),
        mask_taker=base in op_facts.MASK_TAKERS,
        arithmetic=op in op_facts.ARITHMETIC,
        fill=base in op_facts.FILLS or base == "index_put",  # x[m] = s by another name
        asks_torch_first=kind == "first" and op in op_facts.MIXED_SOMETIMES_RAISES,
        mixes_in_place=base not in op_facts.MIXED_INPLACE_RAISES and (op in op_facts.PROMOTED_BY_TORCH or op in op_facts.ARITHMETIC),
        for_backward=kind == "in_place" and base in op_facts.MIXED_BACKWARD_RAISES,
        no_kernel=kernel_fallback.known(line),
        no_backward_kernel=kernel_fallback.known(line, backward=True),
        needs_instructions=not op_facts.SLOW_WITHOUT_INSTRUCTIONS.isdisjoint(line),
        retries=not site.in_place and op_facts.RANDOM.isdisjoint(line) and op_facts.NORMS.isdisjoint(line),
        unlisted=_op_rule(site, unlisted, low) if unlisted is not None else None,
    )
