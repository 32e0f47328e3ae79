"""explain(): what a policy does with one op, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..core import casting, lists, tables
from ..core.active import state
from ..core.casting import dtype_name
from ..core.compiler_stance import untraced
from ..core.ops import sites, table
from ..core.ops.sites import Site, op_of
from ..core.policy.entries import EVERY_OP, ListEntry
from ..core.policy.names import ops_of
from ..core.policy.policy import DEFAULT, Policy, as_policy, in_notebook
from ..core.policy.precedence import Listed
from ..core.rules import emulation, kernels, registry
from ..core.rules.op import CastRule
from ..errors import HmpError

_OF_A_NORM = "; of a norm only the input is cast: weight, bias and statistics keep their dtypes if torch has a kernel for that (R9)"


@dataclass(frozen=True)
class Rule:
    """What a policy does with the op `name`, as explain() returns it; `print()` shows it.

    `cast` is the op's list, "bf16", "fp32", "promote" and so on, or None. `listed_as` is the entry that it follows, `path` and `line`
    the place of that entry. `sites` are the names by which the op can be called, each with what hmp does there. `scoped` are entries for
    some modules that override it, each with its list, file and line. `added` says what lists add that decide no dtype: how its saved
    activations are packed.

    Example:
        >>> hmp.explain("matmul", "habana").listed_as
        'matmul'
    """

    name: str
    cast: str | None
    policy: str
    listed_as: str | None
    path: str | None
    line: int | None
    sites: tuple[str, ...]
    synonyms: tuple[str, ...]
    why: str
    scoped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def __str__(self) -> str:
        on = f"on the {self.cast} list" if self.cast else "on no list"
        place = f" ({self.path}:{self.line})" if self.path else ""
        lines = [f"{self.name}: {on} of policy {self.policy!r}{place}", f"  {self.why}"]
        lines += [f"  {line}" for line in self.added]
        lines += [f"  in some modules: {line}" for line in self.scoped]
        if self.synonyms:
            lines.append(f"  synonyms: {', '.join(self.synonyms)}")
        lines += [f"  {site}" for site in self.sites]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return in_notebook(str(self))


@untraced
def explain(name: str | Callable[..., Any], policy: Policy | str | None = None) -> Rule:
    """Explain what a policy does with an op: its list, its bindings, its synonyms, and why.

    Args:
        name: The op's name, a function of torch's, or the dotted name of a function of yours.
        policy: A policy or a preset's name. Default: the active policy of this thread, else "autocast".

    Returns:
        The rule; `print()` shows it.

    Raises:
        OpListError: The op is unknown; the message has the nearest names.
        HmpError: `name` is another object than a string or a function of torch's.

    Example:
        >>> hmp.explain("softmax", "habana").cast
        'fp32'
    """
    asked = name if isinstance(name, str) else op_of(name)
    if asked is None:
        raise HmpError(
            f"explain() expected an op's name, such as 'softmax', or a function of torch's, got {name!r}; "
            "for your own function give its dotted name, such as 'package.module.function'"
        )
    chosen = as_policy(policy) if policy is not None else state.current_state().user_policy or Policy.load(DEFAULT)
    ops = ops_of(ListEntry(asked, "bf16"))
    op = ops[0] if ops else asked
    listed = Listed(chosen)
    source = listed.entry(op)
    in_star = listed.source(op) is None and op in sites.starred()  # `*` means what no entry names
    meant = {*sites.ancestry(op), *((EVERY_OP,) if in_star else ())}
    scoped = [entry for entry in chosen.scoped if not meant.isdisjoint(ops_of(entry))]
    if op in table.DTYPE_OPS:
        source, scoped = None, []
    decided = {site: d for d in tables.decide(chosen.unscoped).values() for site in d.sites}
    family = [site for relative in dict.fromkeys((op, *sites.relatives(op))) for site in sites.sites_of(relative)]
    lines = tuple(f"{site}: {_at(site, decided.get(site))}" for site in family)
    return Rule(
        name=op,
        cast=source.list_name if source else None,
        policy=chosen.name,
        listed_as=source.text if source else None,
        path=source.path if source else None,
        line=source.line if source else None,
        sites=lines,
        synonyms=sites.synonyms(op),
        why=_why(op, source, chosen),
        scoped=tuple(f"{entry.text}, on the {entry.list_name} list" + (f" ({entry.place})" if entry.path else "") for entry in scoped),
        added=tuple(_added(op, listed, chosen)),
    )


def _at(site: Site, decision: tables.Decision | None) -> str:
    if decision is not None:
        more = [kind.rule.sentence for kind in decision.ruled.added if kind.rule is not decision.ruled.rule]
        return "; ".join([_done(site.op, decision.ruled.rule), *more])
    return "left to torch, whose Python code calls ops that follow the lists" if site.python else "left to torch"


def _done(op: str, rule: CastRule) -> str:
    return rule.sentence + (_OF_A_NORM if op in table.NORMS else "")


def _why(op: str, source: ListEntry | None, policy: Policy) -> str:
    if op in table.DTYPE_OPS:
        return "hmp never casts it, even if it is on a list: its purpose is to set or read a dtype or memory (R7)"
    rule = registry.rule_for(op, source, policy.dtype)
    if sites.is_view(op):
        refused = f"; {registry.FIRST_INPUT.sentence}" if rule is registry.FIRST_INPUT else ""
        return registry.VIEW.sentence + refused + _without_kernel(op)
    if source is None:
        if rule is None or not rule.label or (rule.choose is None and rule.dtype is None):  # it changes no dtype
            return "unlisted: it is left to torch" + _without_kernel(op)
        done = _done(op, rule) + _without_kernel(op) + _without_instructions(op, *casting.LOW)
        return f"unlisted: {done}" if rule.is_list else done
    own = sites.sites_of(op)  # none, for a function of the user's
    if own and sites.writes_first(op):
        return registry.IN_PLACE.sentence
    if rule is None or not rule.is_list:
        return "torch itself promotes its inputs to the widest dtype, so hmp does nothing (R3)"
    described = lists.kind_of(source.list_name).described(policy)
    done = _done(op, rule) + (f" ({described})" if described and rule is lists.kind_of(source.list_name).rule else "")
    spelled = "" if source.name == op else f"; it follows {source.text!r}"
    in_float32 = rule.dtype is not None and rule.dtype(policy.dtype) is torch.float32
    return done + spelled + ("" if in_float32 else _without_kernel(op) + _without_instructions(op, policy.dtype))


def _added(op: str, listed: Listed, policy: Policy) -> Iterator[str]:
    for kind in lists.adding():
        entry = listed.added(kind.name, op)
        if entry is not None and op not in table.DTYPE_OPS:
            yield kind.explained(op, entry, policy)


def _without_instructions(op: str, *dtypes: torch.dtype) -> str:
    is_slow = not sites.writes_first(op) and not table.SLOW_WITHOUT_INSTRUCTIONS.isdisjoint(sites.ancestry(op))
    wide = [dtype for dtype in dtypes if is_slow and dtype in emulation.computed_in_float32()]
    reasons = "; ".join(dict.fromkeys(map(emulation.why, wide)))
    return f"; {registry.NO_INSTRUCTIONS.sentence}: {reasons}" if wide else ""


def _without_kernel(op: str) -> str:
    devices: dict[str, list[str]] = {}
    for device, dtype in sorted(kernels.known_lacks(sites.ancestry(op)), key=str):
        devices.setdefault("any device" if device == "*" else device, []).append(dtype_name(dtype))
    return "".join(
        f"; without a kernel on {device} in {' and '.join(dtypes)}, it runs in float32 there (R11)" for device, dtypes in devices.items()
    )
