"""The kind of list of ops whose saved activations are packed, and its rule."""

from __future__ import annotations

import functools
from typing import Any

from ..core import lists
from ..core.lists import ListKind, SearchLevel, WordFile
from ..core.log import log
from ..core.ops import sites
from ..core.policy.entries import EVERY_OP, ListEntry
from ..core.policy.policy import Policy
from ..core.rules.plug_ins import CastRule, Op, OpUnderRule, count
from .copies import noting
from .formats import FORMATS
from .hooks import check_torch, packing_wrapper
from .packable import KEEPS, packing_of, why_never

SAVED_LIST = CastRule(  # of an op that no other list names; the others say so in their OpUnderRule
    "SAVED_LIST",
    number="R22",
    label="",
    sentence="what it saves for backward is packed (R22)",
    make=lambda op, rule, caster: op,
)


def _around(op: Op, ruled: OpUnderRule) -> Op:
    return packing_wrapper(op, ruled.op, ruled.word("saved_recipe"), functools.partial(_count, ruled.op), hasattr(op, "inlined"))


def _count(op: str, reason: str) -> None:
    """Count a call that saves what torch saves, for hmp.fallbacks()."""
    if count(op, "not packed", reason):
        log.info("%s is on the saved list, but its activations are not packed (%s); hmp.fallbacks() counts such calls", op, reason)


def _refusal(entry: ListEntry, ops: tuple[str, ...]) -> str:
    if ops == (EVERY_OP,):
        return ""
    why = next(filter(None, (why_never(sites.ancestry(op)) for op in ops)), "")
    return f"{entry.name!r} can't be on the saved list: {why}; remove it" if why else ""


def _explained(op: str, entry: ListEntry, policy: Policy) -> str:
    form, place = packing_of(op, policy.saved_recipe).form, f" ({entry.place})" if entry.path else ""
    how = "bits" if form.is_bits else form.name
    return f"what it saves for backward is packed as {how} (R22), by {entry.text!r} on the saved list{place}"


def _report() -> Any:
    from .report import PACKING_PART  # the pages' modules, which only a report needs

    return PACKING_PART


lists.add(
    ListKind(
        name="saved",
        title="saved",
        contents="ops whose saved activations are packed",
        module=__name__,
        rule=SAVED_LIST,
        adds=True,
        words=(WordFile("saved_recipe", "saved_recipe.txt", tuple(FORMATS), "(saved recipe)"),),
        refusal=_refusal,
        every_op=lambda: KEEPS,
        needs=check_torch,
        explained=_explained,
        without_effect="has no effect: hmp knows of no activations that this op saves and that could be packed",
        around=_around,
        around_cast=noting,
        report=_report,
        level=SearchLevel(
            gains="bytes",
            changes="the saved activations",
            objective="bytes",
            recording=lambda bounded: _report().recording(bounded),
            words={"saved_recipe": "int8"},  # of the formats of eight bits the one with the least error
        ),
    )
)
