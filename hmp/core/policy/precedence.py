"""Which entry of a policy's lists decides an op, and ops that two lists claim (R4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ...errors import OpListError
from .. import lists
from ..torch_ops import sites
from .entries import EVERY_OP, ListEntry, ListName

if TYPE_CHECKING:
    from .policy import Policy


def rivals(cast: ListName) -> tuple[ListName, ...]:
    """Return the lists that may not have an op of the list `cast`."""
    own = lists.kind_of(cast).excludes
    return (*own, *(kind.name for kind in lists.kinds() if cast in kind.excludes and kind.name not in own))


class Listed:
    """The policy's lists by op id, for looking up what an op follows."""

    def __init__(self, policy: Policy) -> None:
        self.by_cast: dict[ListName, dict[str, ListEntry]] = {cast: policy.casts_by_op(cast) for cast in lists.names()}
        self._by_name: dict[str, ListEntry] = {}
        for cast in reversed(lists.deciding()):  # the last one of a name counts (R4)
            self._by_name |= self.by_cast[cast]
        stars = (self.by_cast[cast].get(EVERY_OP) for cast in lists.deciding())
        self.star: ListEntry | None = next(filter(None, stars), None)
        self._starred: frozenset[str] = frozenset()
        if self.star is not None:
            every_op = lists.kind_of(self.star.list_name).every_op
            self._starred = frozenset(sites.starred() if every_op is None else every_op())

    def source(self, op: str) -> ListEntry | None:
        """Return the entry that `op` follows: its own, else its base's or a synonym's (R4).

        Of one name the list that comes first in `lists.deciding()` counts.
        """
        for name in sites.ancestry(op):
            if name in self._by_name:
                return self._by_name[name]
        return None

    def entry(self, op: str) -> ListEntry | None:
        """Return the list entry that decides `op`: what source() gives, else `*` if that includes the op."""
        return self.source(op) or (self.star if op in self._starred else None)

    def added(self, cast: ListName, op: str) -> ListEntry | None:
        """Return the entry by which a list that adds to what is done holds for `op`: its own, its base's, a synonym's, or `*`."""
        line, table = sites.ancestry(op), self.by_cast[cast]
        own = next((table[name] for name in line if name in table), None)
        every_op = lists.kind_of(cast).every_op
        if own is not None or EVERY_OP not in table or (every_op is not None and frozenset(every_op()).isdisjoint(line)):
            return own
        return table[EVERY_OP]

    def decides(self, op: str) -> tuple[ListName | None, bool]:
        """Return the list that decides `op`, None for none, and whether torch.autocast decides inside it."""
        entry = self.entry(op)
        return (None, False) if entry is None else (entry.list_name, entry.is_autocasts)


def same_op(ops: Iterable[str], listed: Mapping[str, ListEntry]) -> ListEntry | None:
    """Return the entry for one of `ops`, or for another name of the same function, in `listed` (op id → entry); None for none."""
    return next((listed[name] for op in ops for name in (op, *sites.namesakes(op)) if name in listed), None)


def refuse_both(by_cast: Mapping[ListName, Mapping[str, ListEntry]]) -> None:
    """Raise OpListError for the first op that is on two lists that exclude each other; `by_cast` has each list as op id → entry."""
    for kind in lists.kinds():
        for rival in kind.excludes:
            for op, one in sorted(by_cast[kind.name].items()):
                other = same_op((op,), by_cast[rival])
                if other is not None:
                    also = f" ({other.place})" if other.path else ""
                    spelled = f"{one.text!r}" if one.name == other.name else f"{one.text!r} and {other.text!r} are the same op, which"
                    both = f"on the {kind.title} list and on the {lists.kind_of(rival).title} list{also}"
                    raise OpListError(f"{spelled} is {both}; take it off one of them", one.path, one.line)
