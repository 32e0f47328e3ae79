"""Which entry of a policy's lists decides an op, and ops that two lists claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .. import lists
from ..ops import sites
from .entries import EVERY_OP, ListEntry, ListName, error_at

if TYPE_CHECKING:
    from .policy import Policy


class Listed:
    """The policy's lists by op id, for looking up what an op follows."""

    def __init__(self, policy: Policy) -> None:
        self.by_list = {each: policy.casts_by_op(each) for each in lists.names()}
        self._by_name: dict[str, ListEntry] = {}
        for each in reversed(lists.deciding()):  # the last one of a name counts
            self._by_name |= self.by_list[each]
        self.star = self._by_name.get(EVERY_OP)
        every_op = None if self.star is None else lists.kind_of(self.star.list_name).every_op or sites.starred
        self._starred = frozenset(every_op() if every_op else ())

    def source(self, op: str) -> ListEntry | None:
        """Return the entry that `op` follows: its own, else its base's or a synonym's.

        Of one name the list that comes first in `lists.deciding()` counts.
        """
        return next((self._by_name[name] for name in sites.ancestry(op) if name in self._by_name), None)

    def entry(self, op: str) -> ListEntry | None:
        """Return the list entry that decides `op`: what source() gives, else `*` if that includes the op."""
        return self.source(op) or (self.star if op in self._starred else None)

    def added(self, list_name: ListName, op: str) -> ListEntry | None:
        """Return the entry by which a list that adds to what is done holds for `op`: its own, its base's, a synonym's, or `*`."""
        ancestry, listed = sites.ancestry(op), self.by_list[list_name]
        own = next((listed[name] for name in ancestry if name in listed), None)
        every_op = lists.kind_of(list_name).every_op
        if own is None and EVERY_OP in listed and (every_op is None or not frozenset(every_op()).isdisjoint(ancestry)):
            return listed[EVERY_OP]
        return own

    def decides(self, op: str) -> tuple[ListName | None, bool]:
        """Return the list that decides `op`, None for none, and whether torch.autocast decides inside it."""
        entry = self.entry(op)
        return (None, False) if entry is None else (entry.list_name, entry.is_autocasts)


def same_op(ops: Iterable[str], listed: Mapping[str, ListEntry]) -> ListEntry | None:
    """Return the entry for one of `ops`, or for another name of the same function, in `listed` (op id → entry); None for none."""
    return next((listed[name] for op in ops for name in (op, *sites.namesakes(op)) if name in listed), None)


def refuse_both(by_list: Mapping[ListName, Mapping[str, ListEntry]], remedy: str = "take it off one of them") -> None:
    """Raise OpListError for the first op that is on two lists that exclude each other; `by_list` has each list as op id → entry."""
    for kind in lists.kinds():
        for rival in kind.excludes:
            for op, one in sorted(by_list[kind.name].items()):
                other = same_op((op,), by_list[rival])
                if other is not None:
                    also = f" ({other.place})" if other.path else ""
                    spelled = f"{one.text!r}" if one.text == other.text else f"{one.text!r} and {other.text!r} are the same op, which"
                    both = f"on the {kind.title} list and on the {lists.kind_of(rival).title} list{also}"
                    raise error_at(one, f"{spelled} is {both}; {remedy}")
