"""Which entry of a policy's lists decides an op, and ops that two lists claim (R4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ...errors import OpListError
from ..saved import KEEPS
from ..torch_ops import sites
from .entries import DTYPES, EVERY_OP, LISTS, ListEntry, ListName

if TYPE_CHECKING:
    from .policy import Policy

# A list → those that may not have the same op. FP8 wins over BF16, and all win over promote (R4).
RIVALS: Mapping[ListName, tuple[ListName, ...]] = {"fp8": ("fp32",), "bf16": ("fp32",), "fp32": ("fp8", "bf16")}


class Listed:
    """The policy's lists by op id, for looking up what an op follows."""

    def __init__(self, policy: Policy) -> None:
        self.by_cast: dict[ListName, dict[str, ListEntry]] = {cast: policy.casts_by_op(cast) for cast in LISTS}
        order: tuple[ListName, ...] = ("promote", "fp32", "bf16", "fp8")
        self._by_name: dict[str, ListEntry] = {}
        for cast in order:  # the last one of a name counts (R4)
            self._by_name |= self.by_cast[cast]
        self.star: ListEntry | None = next((self.by_cast[cast][EVERY_OP] for cast in DTYPES if EVERY_OP in self.by_cast[cast]), None)
        self._saved_star = self.by_cast["saved"].get(EVERY_OP)
        self._starred = frozenset(sites.starred()) if self.star is not None else frozenset()

    def source(self, op: str) -> ListEntry | None:
        """Return the entry that `op` follows: its own, else its base's or a synonym's (R4).

        Of one name FP8 comes before BF16, and FP32 before promote.
        """
        for name in sites.ancestry(op):
            if name in self._by_name:
                return self._by_name[name]
        return None

    def entry(self, op: str) -> ListEntry | None:
        """Return the list entry that decides `op`: what source() gives, else `*` if that includes the op."""
        return self.source(op) or (self.star if op in self._starred else None)

    def saves(self, op: str) -> ListEntry | None:
        """Return the entry by which what `op` saves for backward is packed: its own, its base's, a synonym's, or `*`."""
        line, table = sites.ancestry(op), self.by_cast["saved"]
        own = next((table[name] for name in line if name in table), None)
        if own is not None or self._saved_star is None or KEEPS.isdisjoint(line):
            return own
        return self._saved_star

    def decides(self, op: str) -> tuple[ListName | None, bool]:
        """Return the list that decides `op`, None for none, and whether torch.autocast decides inside it."""
        entry = self.entry(op)
        return (None, False) if entry is None else (entry.cast, entry.is_autocasts)


def same_op(ops: Iterable[str], listed: Mapping[str, ListEntry]) -> ListEntry | None:
    """Return the entry for one of `ops`, or for another name of the same function, in `listed` (op id → entry); None for none."""
    return next((listed[name] for op in ops for name in (op, *sites.namesakes(op)) if name in listed), None)


def refuse_both(by_cast: Mapping[ListName, Mapping[str, ListEntry]]) -> None:
    """Raise OpListError for the first op that is on the FP32 list and on a rival of it; `by_cast` has each list as op id → entry."""
    for low, op in ((by_cast[rival], op) for rival in RIVALS["fp32"] for op in sorted(by_cast[rival])):
        one, other = low[op], same_op((op,), by_cast["fp32"])
        if other is not None:
            also = f" ({other.place})" if other.path else ""
            spelled = f"{one.text!r}" if one.name == other.name else f"{one.text!r} and {other.text!r} are the same op, which"
            raise OpListError(
                f"{spelled} is on the {one.cast.upper()} list and on the FP32 list{also}; take it off one of them", one.path, one.line
            )
