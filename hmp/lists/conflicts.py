"""Ops that are on both the BF16 and the FP32 list, under one name or under two names of the same function (R4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import OpListError
from ..ops import sites
from .entries import ListEntry, ListName

# A list → the list that may not have the same op. The promote list is not among them: both others win over it (R4).
RIVALS: Mapping[ListName, ListName] = {"bf16": "fp32", "fp32": "bf16"}


def same_op(ops: Iterable[str], listed: Mapping[str, ListEntry]) -> ListEntry | None:
    """The entry for one of `ops`, or for another name of the same function, in `listed` (op id → entry); None for none."""
    return next((listed[name] for op in ops for name in (op, *sites.namesakes(op)) if name in listed), None)


def refuse_both(bf16: Mapping[str, ListEntry], fp32: Mapping[str, ListEntry]) -> None:
    """Raises OpListError for the first op that is on both lists; each is given as op id → entry."""
    for op in sorted(bf16):
        one, other = bf16[op], same_op((op,), fp32)
        if other is not None:
            also = f" ({other.place})" if other.path else ""
            spelled = f"{one.text!r}" if one.name == other.name else f"{one.text!r} and {other.text!r} are the same op, which"
            raise OpListError(f"{spelled} is on the BF16 list and on the FP32 list{also}; take it off one of them", one.path, one.line)
