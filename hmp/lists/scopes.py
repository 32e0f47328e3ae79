"""A policy and a model become policies of single modules: what the lines that have a scope say there, over the unscoped lists."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from ..errors import HmpError, OpListError
from ..ops import sites
from . import spelling
from .entries import AUTOCAST, CASTS, ListEntry
from .policy import Policy

# The lines that speak of a module, nearest first: those that take precedence over all after them stand in one tuple.
Layers = tuple[tuple[ListEntry, ...], ...]

# torch.compile(module) is a module that holds it under this name.
_COMPILED = "_orig_mod"
_WILDCARD = re.compile(r"\[!?\]?[^\]]*\]|[*?]")


class Place(NamedTuple):
    """A module at one of its paths, with the scoped lines that match the path, and the place that holds it, None for the model itself.

    `path` is plain, `spelled` as named_modules() has it; a line may match either.
    """

    path: str
    spelled: str
    module: torch.nn.Module
    matched: tuple[ListEntry, ...]
    parent: Place | None

    def upwards(self) -> Iterator[Place]:
        """The place itself, the one that holds it, and so on to the model."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent


def refuse_without_model(policy: Policy) -> None:
    """HmpError where the policy has scoped lines: there is no model whose modules they could match."""
    if policy.scoped:
        first = policy.scoped[0]
        at = f"{first.place}: " if first.path else ""
        raise HmpError(
            f"{at}{first.text!r} speaks of the modules of a model, and policy {policy.name!r} is to be in force without one; "
            "use hmp.apply(model, policy) or hmp.convert(policy=policy, model=model), or policy.unscoped, which leaves such lines out"
        )


def resolve(policy: Policy, model: torch.nn.Module) -> dict[torch.nn.Module, Policy]:
    """The policy without scoped lines that holds in each module of `model`, the model itself first.

    A line holds in the modules whose path its glob matches and in all modules inside them, over what the unscoped lists say of its ops and
    of those that follow them. Of several that speak of an op, that of the nearest module wins, and on one module that of the glob with more
    characters that are no wildcards; BF16 and FP32 win over promote. A module at several paths follows the lines that match any of them.
    Modules that the same lines speak of have the same object. Raises OpListError for a line that matches no module, and for two
    that are as near and as exact and have an op on the BF16 and on the FP32 list.
    """
    places = list(_places(model, policy.scoped))
    _refuse_unmatched(policy, places)
    nearness: dict[torch.nn.Module, dict[ListEntry, int]] = {}
    for place in places:
        steps = nearness.setdefault(place.module, {})
        for distance, above in enumerate(place.upwards()):
            for rule in above.matched:
                steps[rule] = min(distance, steps.get(rule, distance))
    of_layers = functools.cache(functools.partial(effective, policy.unscoped))
    return {module: of_layers(_layers(steps)) for module, steps in nearness.items()}


def differing(policies: Mapping[torch.nn.Module, Policy], model: torch.nn.Module, outside: Policy) -> dict[torch.nn.Module, Policy]:
    """Those of the policies whose modules may be called where another one is in force: that of a module around them, or `outside`.

    All modules around one count, not just the one that holds it: a container is never called itself, and code may reach past a module.
    """
    found: dict[torch.nn.Module, Policy] = {}
    for place in _places(model, ()):
        own = policies[place.module]
        if own is not outside or any(policies[above.module] is not own for above in place.upwards()):
            found[place.module] = own
    return found


def shared(model: torch.nn.Module) -> frozenset[str]:
    """The modules that are at several paths, each by the first that named_modules() has, as plain_path() gives it."""
    first: dict[torch.nn.Module, str] = {}
    found: set[str] = set()
    for place in _places(model, ()):
        path = first.setdefault(place.module, place.path)
        if path != place.path:
            found.add(path)
    return frozenset(found)


def plain_path(path: str) -> str:
    """The path that a module has in the model before parts of it, or all of it, were given to torch.compile."""
    return ".".join(part for part in path.split(".") if part != _COMPILED)


def effective(base: Policy, layers: Layers) -> Policy:
    """`base` with these lines over its lists: each takes its ops, with their synonyms and forms, from all that comes after (R4)."""
    taken: dict[str, ListEntry] = {}
    kept: list[ListEntry] = []
    for layer in layers:
        spoken = [(rule, [op for op in spelling.resolve(rule) if op not in taken]) for rule in layer]
        _refuse_tie(spoken)
        for rule, ops in spoken:
            kept += _left(rule, ops) if ops else ()
            for op in ops:
                for relative in (op, *sites.relatives(op)):
                    taken.setdefault(relative, rule)
    if not taken:
        return base
    for rule in _rules(base):
        kept += _left(rule, [op for op in spelling.resolve(rule) if op not in taken])
    origin = {(rule.cast, rule.name): rule for rule in reversed(kept)}
    bf16, fp32, promote = (frozenset(name for on, name in origin if on == cast) for cast in CASTS)
    return Policy(base.name, base.dtype, bf16, fp32, promote, origin=origin)


def _left(rule: ListEntry, ops: list[str]) -> Iterator[ListEntry]:
    """The rule where all its ops are left to it; where some are, rules for those that have a name which stands for no other op."""
    every = spelling.resolve(rule)
    if len(ops) == len(every):
        yield rule
        return
    for op in ops:
        named = rule._replace(name=op + (AUTOCAST if rule.is_autocasts else ""))
        if set(spelling.resolve(named)) <= set(ops):
            yield named


def _rules(policy: Policy) -> Iterator[ListEntry]:
    for cast in CASTS:
        for name in sorted(getattr(policy, cast)):
            yield policy.origin.get((cast, name)) or ListEntry(name, cast)


def _refuse_tie(spoken: Iterable[tuple[ListEntry, list[str]]]) -> None:
    by_op: dict[str, ListEntry] = {}
    for rule, ops in spoken:
        for op in ops if rule.cast != "promote" else ():
            other = by_op.setdefault(op, rule)
            if other.cast != rule.cast:
                also = f" ({other.place})" if other.path else ""
                raise OpListError(
                    f"{rule.text!r} on the {rule.cast.upper()} list and {other.text!r} on the {other.cast.upper()} list{also} speak of the "
                    "same op for one module, and neither scope is nearer or more exact; take one of them out, or write more of a path",
                    rule.path,
                    rule.line,
                )


def _layers(steps: Mapping[ListEntry, int]) -> Layers:
    ranked: dict[tuple[int, int], list[ListEntry]] = {}
    for rule, distance in steps.items():
        ranked.setdefault((distance, -exactness(str(rule.scope))), []).append(rule)
    return tuple(tuple(sorted(ranked[rank], key=str)) for rank in sorted(ranked))


def exactness(scope: str) -> int:
    """How many characters of the glob are no wildcards; `[0-9]` is one."""
    return len(_WILDCARD.sub("", scope))


def _places(model: torch.nn.Module, lines: Iterable[ListEntry]) -> Iterator[Place]:
    """Every module of `model` at every path, holders before what they hold. What is scripted is compiled: no line reaches it."""
    matching = [(re.compile(fnmatch.translate(str(rule.scope))), rule) for rule in lines]

    def place(spelled: str, module: torch.nn.Module, parent: Place | None) -> Place:
        path = plain_path(spelled)
        matched = tuple(rule for glob, rule in matching if glob.match(path) or glob.match(spelled))
        return Place(path, spelled, module, matched, parent)

    waiting = [place("", model, None)]
    while waiting:
        here = waiting.pop()
        yield here
        inside = [
            place(f"{here.spelled}.{name}" if here.spelled else name, child, here)
            for name, child in here.module._modules.items()
            if child is not None
            and not isinstance(child, torch.jit.ScriptModule)
            and all(above.module is not child for above in here.upwards())  # a module may hold one that holds it
        ]
        waiting += reversed(inside)


def _refuse_unmatched(policy: Policy, places: list[Place]) -> None:
    matched = {rule for place in places for rule in place.matched}
    for rule in policy.scoped:
        if rule not in matched:
            model = type(places[0].module).__name__
            raise OpListError(
                f"{rule.text!r} matches no module of {model}, whose modules are named as model.named_modules() has them; "
                f"{_hint(str(rule.scope), [place.path for place in places if place.path])}",
                rule.path,
                rule.line,
            )


def _hint(scope: str, paths: list[str]) -> str:
    """The nearest scope that matches one of the paths; without one, some of the paths."""
    if not paths:
        return "this one holds no others"
    names = dict.fromkeys(name for path in paths for name in path.split("."))
    parts = [part if part in names or _WILDCARD.search(part) else _nearest(part, names) or part for part in scope.split(".")]
    near = [".".join(parts), *(f"{depth}{'.'.join(parts)}" for depth in ("*.", "*"))]
    found = next((glob for glob in near if any(fnmatch.fnmatchcase(path, glob) for path in paths)), None)
    found = found or _nearest(scope.rstrip("*."), paths)
    if found is not None:
        return f"did you mean {found!r}?"
    top = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    return f"it holds {', '.join(map(repr, top[:6]))}{' and others' if len(top) > 6 else ''}"


def _nearest(name: str, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)), None)
