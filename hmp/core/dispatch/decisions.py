"""What a policy does with each torch function that it changes, and the function that is called in its place."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import lists, low_kernels
from ..active import Replacements
from ..lists import ListKind
from ..observe import Listener
from ..patching import patches
from ..policy import EVERY_OP, Listed, ListEntry, Policy, spelling
from ..rules import CastRule, OpRule, op_wrap, rules
from ..torch_ops import Site, calling, op_facts, sites
from . import user_functions


class Decision:
    """What a policy does with one torch function.

    The rule that is applied, the list entry that it comes from (None for R5 to R12), and the sites of the function.
    """

    def __init__(
        self, sites: tuple[Site, ...], source: ListEntry | None, kind: CastRule, make: Callable[[], OpRule], is_added_to: bool = False
    ) -> None:
        self.original = sites[0].original
        self.kind = kind
        self.source = source
        self.sites = sites
        self._make = make
        self.is_listed = is_added_to or source is not None  # on any list
        self._made: tuple[object, frozenset[torch.dtype], Callable[..., Any]] | None = None

    def also_at(self, site: Site) -> Decision:
        """Return the decision for a function that is at `site` too."""
        return Decision((*self.sites, site), self.source, self.kind, self._make, self.is_listed)

    def adding(self, kind: ListKind, words: Mapping[str, str]) -> Decision:
        """Return the decision, with what a list that adds to it asks for."""

        def make() -> OpRule:
            return _with_words(self.rule, words)._replace(added=(*self.rule.added, kind))

        return Decision(self.sites, self.source, self.kind, make, is_added_to=True)

    @functools.cached_property
    def rule(self) -> OpRule:
        """Return the op under the rule. Made when a wrapper is, or somebody asks: a policy changes some four hundred functions."""
        return self._make()

    @property
    def wrapper(self) -> Callable[..., Any]:
        """Return what is called instead of the function.

        Made once until torch is unpatched, for all policies with this decision: it remembers what failed (R11).
        """
        made, slow = self._made, low_kernels.computed_in_float32()
        if made is None or made[0] is not patches.installation() or made[1] != slow:
            made = self._made = patches.installation(), slow, op_wrap(self.original, self.rule)
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
        make = functools.partial(rules.user_rule, site.original, name, source.cast, policy.dtype)
        _add(found, site, source, rules.of_list(source.cast), make)
    for site, cast in registered:
        if site.original not in found:
            make = functools.partial(rules.user_rule, site.original, site.op, cast, policy.dtype)
            _add(found, site, None, rules.of_list(cast), make)
    return _with_composites(found, policy)


def forget() -> None:
    """Decide anew: ops have been replaced by functions since the last decision."""
    _of_torch.cache_clear()  # type: ignore[attr-defined]
    _of_ops.cache_clear()  # type: ignore[attr-defined]


def _dotted(policy: Policy) -> Iterator[tuple[str, ListEntry]]:
    """Yield the entries of the lists that may be users' functions."""
    for cast in lists.for_functions():
        if any("." in name for name in getattr(policy, cast)):
            yield from ((name, rule) for name, rule in policy.casts_by_op(cast).items() if "." in name)


@functools.partial(sites.cached, most=16)  # some hundred kilobytes each
def _of_torch(policy: Policy) -> Mapping[Any, Decision]:
    """Return what the policy does with torch's own functions."""
    return _with_composites(_of_ops(policy).copy(), policy)


def _with_composites(found: dict[Any, Decision], policy: Policy) -> dict[Any, Decision]:
    """Return `found`, with torch's Python functions that call a listed op added: each is one op, inside which nothing is cast (R8)."""
    for site in calling({site.attribute for d in found.values() if d.is_listed for site in d.sites}, found):
        _add(found, site, None, rules.ONE_OP, functools.partial(rules.op_rule, site, rules.ONE_OP, policy.dtype))
    return found


@functools.partial(sites.cached, most=16)
def _of_ops(policy: Policy) -> dict[Any, Decision]:
    """Return what the policy does with torch's own ops, without the functions that only call such ops (see `_with_composites`)."""
    listed = Listed(policy)
    found: dict[Any, Decision] = {}
    for op in _candidates(listed):
        source = listed.entry(op)
        if op in op_facts.DTYPE_OPS or (op in op_facts.STRUCTURE and source is None):
            continue
        kind = rules.rule_for(op, source, policy.dtype)
        if kind is None or kind is rules.VIEW:
            continue
        for site in sites.sites_of(op):
            if site.is_private and source is None and op not in op_facts.FORWARDERS:
                continue  # left to torch, which raises
            make = functools.partial(rules.op_rule, site, kind, policy.dtype)
            if source is not None and lists.kind_of(source.cast).rule is kind and lists.kind_of(source.cast).words:
                make = functools.partial(_made_with_words, make, _words(lists.kind_of(source.cast), policy))
            _add(found, site, source if kind.is_list else None, kind, make)
    for added in lists.adding():
        if listed.by_cast[added.name]:
            _add_added(found, listed, policy, added)
    return found


def _add_added(found: dict[Any, Decision], listed: Listed, policy: Policy, kind: ListKind) -> None:
    """Have done what a list adds to whatever else is done with its ops."""
    names, words = listed.by_cast[kind.name].keys(), _words(kind, policy)
    every_op = sites.starred if kind.every_op is None else kind.every_op
    having: set[Any] = set()
    for op in dict.fromkeys(_with_relatives((*(names - {EVERY_OP}), *(every_op() if EVERY_OP in names else ())))):
        entry = listed.added(kind.name, op)
        for site in sites.sites_of(op) if entry is not None and op not in op_facts.DTYPE_OPS else ():
            known = found.get(site.original)
            if known is None:
                make = functools.partial(rules.op_rule, site, kind.rule, policy.dtype)
                known = Decision((site,), entry, kind.rule, make)
            if site.original not in having:
                having.add(site.original)
                found[site.original] = known.adding(kind, words)
            elif site not in known.sites:
                found[site.original] = known.also_at(site)


def _candidates(listed: Listed) -> Iterable[str]:
    """Return the ids of all ops that may need a wrapper under a policy with these lists."""
    named = [name for table in listed.by_cast.values() for name in table if name != EVERY_OP]
    unlisted = [name for rule in rules.RULES for name in rule.ops]
    return dict.fromkeys((*_with_relatives(named), *_with_relatives(unlisted), *(sites.starred() if listed.star is not None else ())))


def _with_relatives(ops: Iterable[str]) -> list[str]:
    found: list[str] = []
    for op in ops:
        found += (op, *sites.relatives(op))
    return found


def _words(kind: ListKind, policy: Policy) -> Mapping[str, str]:
    return {word.field: getattr(policy, word.field) for word in kind.words}


def _made_with_words(make: Callable[[], OpRule], words: Mapping[str, str]) -> OpRule:
    return _with_words(make(), words)


def _with_words(rule: OpRule, words: Mapping[str, str]) -> OpRule:
    return rule._replace(words=tuple({**dict(rule.words), **words}.items()))


def _add(found: dict[Any, Decision], site: Site, source: ListEntry | None, kind: CastRule, make: Callable[[], OpRule]) -> None:
    # one function may have several sites: torch.conv2d is F.conv2d
    known = found.get(site.original)
    found[site.original] = Decision((site,), source, kind, make) if known is None else known.also_at(site)


def dtype_repairs() -> Replacements:
    """Torch's function → its wrapper where no list applies: for the ops that torch may refuse to run, and no others (R5, R7, R11)."""
    return replacements({original: d for original, d in _of_ops(Policy("no lists")).items() if d.kind.repairs})


def replacements(decisions: Mapping[Any, Decision], told: Sequence[Listener] = ()) -> Replacements:
    """Torch's function → its wrapper, for these decisions. With listeners, the wrappers are new."""

    def make(original: Any) -> Callable[..., Any]:
        decision = decisions[original]
        return op_wrap(original, decision.rule, told) if told else decision.wrapper

    return Replacements(decisions.keys(), make)


def to_patch(decisions: Mapping[Any, Decision]) -> dict[Any, Decision]:
    """Return the decisions whose functions are patched: all but torch's Python functions that only call a builtin, which is."""
    return {original: d for original, d in decisions.items() if not _forwards(original, d)}


def _forwards(original: Any, decision: Decision) -> bool:
    function = original if isinstance(original, types.FunctionType) else None
    return function is not None and function.__module__ == "torch.nn.functional" and decision.sites[0].op in op_facts.FORWARDERS
