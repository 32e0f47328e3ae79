"""What is decided: units, and the policy that a choice among them makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ...core.lists import ListKind, deciding, kind_of
from ...core.ops.sites import ancestry, sites_of
from ...core.policy.entries import AUTOCAST, EVERY_OP, ListEntry, ListName
from ...core.policy.names import ops_of
from ...core.policy.policy import Policy, as_policy
from ...core.policy.precedence import Listed
from ...core.policy.presets import policies
from ...errors import HmpError

LOW, WIDE = "bf16", "fp32"
_CASTS: tuple[ListName, ...] = (LOW, WIDE, "promote")  # the lists that every policy has


class Key(NamedTuple):
    """A unit: an op, everywhere (`module` None) or in the calls of one module ("" for those outside every module of the model)."""

    op: str
    module: str | None = None

    def __str__(self) -> str:
        return f"{self.op} @ {self.module}" if self.module else self.op


Choice = Mapping[ListName, frozenset[Key]]  # the units on each list; those on none that decides are on the FP32 list


def moved(choice: Choice, keys: frozenset[Key], kind: ListKind) -> dict[ListName, frozenset[Key]]:
    """Return the choice with `keys` on that list, and on no other that says what they compute in."""
    others = {name: units if kind.adds or kind_of(name).adds else units - keys for name, units in choice.items()}
    return {**others, kind.name: choice.get(kind.name, frozenset()) | keys}


class Decisions:
    """The ops that are decided, over a policy that says what is done with the others. Raise HmpError where `ops` holds no op's name.

    `levels` are the kinds of lists that units may move to besides the BF16 list.
    """

    def __init__(self, start: Policy, ops: Collection[str] | None, per_module: bool, levels: Collection[ListKind]) -> None:
        if ops is not None and (isinstance(ops, str) or not ops):
            raise HmpError(f"invalid ops={ops!r}: expected a list of op names, such as ['softmax', 'linear'], or None for all")
        self.start = start
        self.low = start.dtype
        self.per_module = per_module
        self.levels = tuple(levels)
        self.all = ops is None
        self.ops = frozenset(_listed(start) if ops is None else (op for name in ops for op in ops_of(ListEntry(name, LOW))))
        self._calls: Mapping[Key, int] = {}

    def op_of(self, op: str) -> str | None:
        """Return the decided op that `op` (rmul, softmax of torch.special) is decided with, None for none."""
        return next((each for each in ancestry(op) if each in self.ops), None)

    def key(self, op: str, module: str) -> Key:
        """Return the unit that a call of the op in that module belongs to."""
        return Key(op, module if self.per_module else None)

    def found(self, calls: Mapping[Key, int]) -> None:
        """Say which units there are, and how often each is called."""
        self._calls = calls

    def policy(self, choice: Choice, name: str = "tuned") -> Policy:
        """Return the policy of the choice. Before found(), all decided ops are decided for all modules."""
        calls = self._calls or dict.fromkeys(map(Key, self.ops), 1)
        listed: dict[ListName, set[str]] = defaultdict(set)
        scoped: list[ListEntry] = []
        lists = {key: cast for cast, keys in choice.items() if cast in deciding() for key in keys}
        for op in sorted({key.op for key in calls}):
            wanted: dict[Key, ListName] = {key: lists.get(key, WIDE) for key in calls if key.op == op}
            everywhere = _everywhere(wanted, calls)
            listed[everywhere].add(op)
            scoped += _lines(op, wanted, everywhere)
        decided = frozenset().union(*listed.values())
        rest = {cast: _without(getattr(self.start, cast), cast, decided) for cast in _CASTS}
        lists_of = {cast: rest.get(cast, frozenset()) | listed[cast] for cast in {*rest, *listed}}
        return self.start.replace(name=name, scoped=tuple(scoped), **lists_of)

    def adding(self, policy: Policy, kind: ListKind, keys: frozenset[Key]) -> Policy:
        """Return the policy with these units on a list that adds: an op by its name where no module is named, else by the modules."""
        assert kind.level is not None
        named = frozenset(key.op for key in keys if not key.module)
        lines = [ListEntry(key.op, kind.name, scope=scope_of(key.module)) for key in sorted(keys) if key.module and key.op not in named]
        return policy.replace(scoped=(*policy.scoped, *lines), **{kind.name: named}, **kind.level.words)

    def coverable(self, kind: ListKind, keys: frozenset[Key], among: Iterable[Key]) -> frozenset[Key]:
        """Return the units that entries can put on the list without others of `among`.

        An entry holds for the modules inside, too, and on a list that adds none takes them out again.
        """
        barred = set(among) - keys
        if not kind.adds:
            return keys
        return frozenset(
            key for key in keys if not any(key.op == each.op and (not key.module or _is_inside(each.module, key.module)) for each in barred)
        )

    def choice_of(self, policy: Policy, keys: Iterable[Key]) -> Choice:
        """Return the units that a policy without scoped entries has on the BF16 list."""
        listed = Listed(policy)
        sources = {key: listed.source(key.op) or listed.star for key in keys}
        return {LOW: frozenset(key for key, source in sources.items() if source is not None and source.list_name == LOW)}


def _is_inside(inner: str | None, outer: str) -> bool:
    return f"{inner}.".startswith(f"{outer}.")


def _everywhere(wanted: Mapping[Key, ListName], calls: Mapping[Key, int]) -> ListName:
    """Return the list for the line without a scope: what holds outside every module, else what most calls want."""
    outside = [key for key in wanted if not key.module]
    votes: dict[ListName, int] = {WIDE: 0}  # of two that are even the wider one
    for key in outside or wanted:
        votes[wanted[key]] = votes.get(wanted[key], 0) + calls[key]
    return max(votes, key=lambda cast: votes[cast])


def _lines(op: str, chosen: Mapping[Key, ListName], everywhere: ListName) -> list[ListEntry]:
    """Return the scoped entries that say where the op is not on the list that it is on everywhere.

    An entry holds for the modules inside as well, so those have one too.
    """
    wanted: dict[str, ListName] = {key.module: cast for key, cast in chosen.items() if key.module}
    others = [path for path, cast in wanted.items() if cast != everywhere]
    said = {path: cast for path, cast in wanted.items() if any(_is_inside(path, each) for each in others)}
    return [ListEntry(op, cast, scope=scope_of(path)) for path, cast in sorted(said.items())]


def scope_of(path: str) -> str:
    """Return the glob that matches the path; characters that a list cannot spell are any one character."""
    return "".join("?" if char in "@#" or char.isspace() else f"[{char}]" if char in "*?[" else char for char in path)


def _listed(start: Policy) -> set[str]:
    """Return the ops of torch that `start` or a preset has on its BF16 or FP32 list."""
    found: set[str] = set()
    for cast in (LOW, WIDE):
        found.update(op for op in start.casts_by_op(cast) if sites_of(op))
        for preset in map(as_policy, policies()):
            # a name that this release of torch does not know is nobody's to call
            names = (name.removesuffix(AUTOCAST) for name in getattr(preset, cast))
            found.update(name for name in names if name != EVERY_OP and sites_of(name))
    return found


def _without(names: Iterable[str], cast: ListName, ops: frozenset[str]) -> frozenset[str]:
    """Return the names less those of `ops`; a name that stands for several ops leaves the others."""
    kept: set[str] = set()
    for name in names:
        stands_for = ops_of(ListEntry(name, cast)) if name != EVERY_OP else (EVERY_OP,)
        if not ops.intersection(stands_for):
            kept.add(name)
        else:
            # as a name an op's id may stand for others, too, as _native_multi_head_attention does
            kept.update(op for op in stands_for if ops.isdisjoint((op, *ops_of(ListEntry(op, cast)))))
    return frozenset(kept)
