"""What is decided: units, and the policy that a choice among them makes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ...core.ops.sites import ancestry, sites_of
from ...core.policy import AUTOCAST, EVERY_OP, Listed, ListEntry, ListName, Policy, as_policy, ops_of, policies
from ...errors import HmpError

_CASTS = ("bf16", "fp32", "promote")  # the lists that every policy has


class Key(NamedTuple):
    """A unit: an op, everywhere (`module` None) or in the calls of one module ("" for those outside every module of the model)."""

    op: str
    module: str | None = None

    def __str__(self) -> str:
        return f"{self.op} @ {self.module}" if self.module else self.op


class Decisions:
    """The ops that are decided, over a policy that says what is done with the others. Raise HmpError where `ops` holds no op's name.

    `shared` are the paths of modules that are at others, too. `in_fp8` says whether FP8 is one of the levels, `packs` whether what is saved
    for backward may be packed.
    """

    def __init__(
        self,
        start: Policy,
        ops: Collection[str] | None,
        per_module: bool,
        shared: Collection[str] = (),
        *,
        in_fp8: bool = False,
        packs: bool = False,
    ) -> None:
        if ops is not None and (isinstance(ops, str) or not ops):
            raise HmpError(f"invalid ops={ops!r}: expected a list of op names, such as ['softmax', 'linear'], or None for all")
        self.start = start
        self.low = start.dtype
        self.per_module = per_module
        self.in_fp8, self.packs = in_fp8, packs
        self._shared = frozenset(shared)
        self.all = ops is None
        self.ops = frozenset(_listed(start) if ops is None else (op for name in ops for op in ops_of(ListEntry(name, "bf16"))))
        # what an op does that is listed by itself does not change with the ops that are decided
        self._rest = {cast: _without(getattr(start, cast), cast, self.ops) for cast in _CASTS}
        self._calls: Mapping[Key, int] = {}

    def op_of(self, op: str) -> str | None:
        """Return the decided op that `op` (rmul, softmax of torch.special) is decided with, None for none."""
        return next((each for each in ancestry(op) if each in self.ops), None)

    def key(self, op: str, module: str) -> Key:
        """Return the unit that a call of the decided op in that module belongs to."""
        return Key(op, module if self.per_module else None)

    def found(self, calls: Mapping[Key, int]) -> None:
        """Say which units there are, and how often each is called."""
        self._calls = calls

    def policy(self, low: Iterable[Key], name: str = "tuned", left: Collection[str] = (), fp8: Iterable[Key] = ()) -> Policy:
        """Return the policy that has the units `fp8` on the FP8 list, those of `low` on the BF16 list and the others on the FP32 list.

        The ops of `left` stay as the start has them if none of their units is on either of the first two.
        """
        chosen: dict[Key, ListName] = {**dict.fromkeys(low, "bf16"), **dict.fromkeys(fp8, "fp8")}
        lists: dict[ListName, set[str]] = {"fp8": set(), "bf16": set(), "fp32": set()}
        scoped: list[ListEntry] = []
        if not self._calls:  # nobody knows yet which are called
            by_op = {key.op: cast for key, cast in chosen.items()}
            for op in self.ops:
                lists[by_op.get(op, "fp32")].add(op)
        stay = frozenset(left) - {key.op for key in chosen}
        for op in sorted({key.op for key in self._calls} - stay):
            wanted: dict[Key, ListName] = {key: chosen.get(key, "fp32") for key in self._calls if key.op == op}
            everywhere = self._everywhere(wanted)
            lists[everywhere].add(op)
            scoped += _lines(op, wanted, everywhere, self._shared)
        return self._with(lists, scoped, name)

    def low_of(self, policy: Policy, keys: Iterable[Key]) -> frozenset[Key]:
        """Return those of the units that a policy without scoped entries has on its BF16 list."""
        return frozenset(key for key, cast in _casts(policy, keys).items() if cast == "bf16")

    def left_of(self, policy: Policy, keys: Iterable[Key]) -> frozenset[str]:
        """Return those of the ops that such a policy has on neither its BF16 nor its FP32 list: they run in what their inputs come in."""
        return frozenset(key.op for key, cast in _casts(policy, keys).items() if cast not in ("bf16", "fp32"))

    def _everywhere(self, wanted: Mapping[Key, ListName]) -> ListName:
        """Return the list for the line without a scope: what holds outside every module, else what most calls want."""
        outside = [key for key in wanted if not key.module]
        calls: dict[ListName, int] = {"fp32": 0, "bf16": 0, "fp8": 0}  # of two that are even the wider one
        for key in outside or wanted:
            calls[wanted[key]] += self._calls[key]
        return max(calls, key=lambda cast: calls[cast])

    def _with(self, lists: Mapping[ListName, Collection[str]], scoped: Iterable[ListEntry], name: str) -> Policy:
        decided = frozenset().union(*lists.values())
        rest = self._rest if decided == self.ops else {cast: _without(getattr(self.start, cast), cast, decided) for cast in _CASTS}
        return Policy(
            name=name,
            dtype=self.low,
            bf16=rest["bf16"].union(lists["bf16"]),
            fp32=rest["fp32"].union(lists["fp32"]),
            promote=rest["promote"],
            fp8=frozenset(lists["fp8"]),
            fp8_recipe=self.start.fp8_recipe,
            fp8_kernel=self.start.fp8_kernel,
            saved=self.start.saved,
            saved_recipe=self.start.saved_recipe,
            scoped=tuple(scoped),
        )


def _casts(policy: Policy, keys: Iterable[Key]) -> dict[Key, ListName | None]:
    listed = Listed(policy)
    sources = {key: listed.source(key.op) or listed.star for key in keys}
    return {key: None if source is None else source.list_name for key, source in sources.items()}


def _lines(op: str, chosen: Mapping[Key, ListName], everywhere: ListName, shared: Collection[str]) -> list[ListEntry]:
    """Return the scoped entries that say where the op is not on the list that it is on everywhere.

    One where a module differs from what holds around it, since a line holds for the modules inside as well.
    """
    said: dict[str, ListName] = {}
    wanted: dict[str, ListName] = {key.module: cast for key, cast in chosen.items() if key.module}
    for module in sorted(wanted, key=lambda path: path.count(".")):
        parts = module.split(".")
        around = next((said[path] for at in range(len(parts) - 1, 0, -1) if (path := ".".join(parts[:at])) in said), everywhere)
        if wanted[module] != around:
            said[module] = wanted[module]
    if said:
        # what holds around it is another thing at another path, or a line may match it that is meant for another module
        loose = any("?" in scope_of(path) for path in said)
        said |= {path: cast for path, cast in wanted.items() if loose or path in shared}
    return [ListEntry(op, cast, scope=scope_of(path)) for path, cast in sorted(said.items())]


def scope_of(path: str) -> str:
    """Return the glob that matches the path; characters that a list cannot spell are any one character."""
    return "".join("?" if char in "@#" or char.isspace() else f"[{char}]" if char in "*?[" else char for char in path)


def _listed(start: Policy) -> set[str]:
    """Return the ops of torch that `start` or a preset has on its BF16 or FP32 list."""
    found: set[str] = set()
    casts: tuple[ListName, ...] = ("bf16", "fp32")
    for cast in casts:
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
