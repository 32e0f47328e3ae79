"""Ops that are on the FP32 list and on the BF16 or the FP8 list, under one name or under two names of the same function (R4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...errors import OpListError
from ..torch_ops import sites
from .entries import ListEntry, ListName

# A list → those that may not have the same op. FP8 wins over BF16, and all win over promote (R4).
RIVALS: Mapping[ListName, tuple[ListName, ...]] = {"fp8": ("fp32",), "bf16": ("fp32",), "fp32": ("fp8", "bf16")}


def same_op(ops: Iterable[str], listed: Mapping[str, ListEntry]) -> ListEntry | None:
    """The entry for one of `ops`, or for another name of the same function, in `listed` (op id → entry); None for none."""
    return next((listed[name] for op in ops for name in (op, *sites.namesakes(op)) if name in listed), None)


def refuse_both(by_cast: Mapping[ListName, Mapping[str, ListEntry]]) -> None:
    """Raises OpListError for the first op that is on the FP32 list and on a rival of it; `by_cast` has each list as op id → entry."""
    for low, op in ((by_cast[rival], op) for rival in RIVALS["fp32"] for op in sorted(by_cast[rival])):
        one, other = low[op], same_op((op,), by_cast["fp32"])
        if other is not None:
            also = f" ({other.place})" if other.path else ""
            spelled = f"{one.text!r}" if one.name == other.name else f"{one.text!r} and {other.text!r} are the same op, which"
            raise OpListError(
                f"{spelled} is on the {one.cast.upper()} list and on the FP32 list{also}; take it off one of them", one.path, one.line
            )
