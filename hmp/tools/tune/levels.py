"""The search of one level: which units move to a list with fewer bits, found with one greedy order and bisection.

Three levels are searched alike: the low-precision dtype, then FP8, then packing of what is saved for backward.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

from ...core import lists
from ...core.compiler_stance import running_uncompiled
from ...core.observe import Call, Listener, listen, modules
from ...core.policy import ListEntry, Policy, as_policy, plain_path
from .decisions import Decisions, Key, scope_of
from .result import Objective, PackedUnit, Trial, Unit
from .task import Task
from .trials import Trials

# The preset whose recipe packs: of those with eight bits it has the least error.
PRESET = "saved8"
_NO_FP8 = "no matrix multiplication moved to FP8: in none of the decided ops are the dimensions supported by FP8 and the results finite"
_NO_FASTER = "no matrix multiplication moved to FP8: within the tolerance, but not faster on this device"
_NOTHING_KEPT = "no activations packed: no op saves tensors that are large enough"
_LITTLE_KEPT = "no activations packed: it would save too little"

Fits = Callable[[frozenset[Key], "Key | None"], bool]


def greedy_order(gains: Mapping[Key, float], changes: Mapping[Key, float]) -> list[Key]:
    """Return the units that gain something and change a finite amount, the least change for its gain first."""
    able = [key for key, gain in gains.items() if gain > 0 and math.isfinite(changes[key])]
    return sorted(able, key=lambda key: (changes[key] / gains[key], str(key)))


def search_level(order: Sequence[Key], changes: Mapping[Key, float], limit: float, fits: Fits, bar: Callable[[Key], None]) -> None:
    """Try all units, then those whose changes add up to `limit` at most, then bisect for each unit that is one too many.

    Args:
        order: the units, in the order in which they are added.
        changes: by unit, what it is expected to change.
        limit: what the changes of the first smaller set may add up to.
        fits: makes the trial of a set of units, and says if it is within the tolerance. It is also given the unit that was added last
            where the set ends inside the order.
        bar: is called with each unit that stays out.
    """
    if not order or fits(frozenset(order), None):
        return
    first, total = set[Key](), 0.0
    for key in order:
        if total + changes[key] <= limit:
            first.add(key)
            total += changes[key]
    good = frozenset(first)
    if not good or not fits(good, None):
        good = frozenset()
    rest = [key for key in order if key not in good]
    while True:
        fitting, failing = 0, len(rest)  # how many of the rest still fit with the good ones, and how many do not
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if fits(good.union(rest[:middle]), rest[middle - 1]):
                fitting = middle
            else:
                failing = middle
        bar(rest[fitting])
        good, rest = good.union(rest[:fitting]), rest[fitting + 1 :]
        if not rest or fits(good.union(rest), None):
            return


# --- FP8 ---


def search_fp8(
    task: Task,
    decisions: Decisions,
    trials: Trials,
    notes: list[str],
    units: Mapping[Key, Unit],
    low: frozenset[Key],
    left: frozenset[str],
) -> None:
    """Move as much of the products' work to FP8 as the tolerance allows, from the lists with `low` in the low-precision dtype.

    Work is what counts, since most devices emulate FP8, where a step's time says nothing of what it takes where FP8 is computed.

    Raises:
        Over: the search's time or number of trials is spent.
    """
    changes = {key: unit.sensitivity_fp8 for key, unit in units.items()}
    order = greedy_order({key: unit.work_fp8 for key, unit in units.items()}, changes)
    if not order:
        notes.append(_NO_FP8)
        return
    start = decisions.start
    is_timed = trials.objective == Objective.TIME and lists.kind_of("fp8").level.has_kernels(start, task.device)
    most, found = 0, None

    def fits(fp8: frozenset[Key], last: Key | None) -> bool:
        nonlocal most, found
        name = _name(fp8, order, "in FP8", last)
        others, stay = low - fp8, left - {key.op for key in fp8}
        trial = trials.of(name, decisions.policy(others, name, stay, fp8), others, stay, fp8)
        moved = sum(units[key].work_fp8 for key in fp8)
        if trial.fits and moved > most:
            most, found = moved, trial
            if not is_timed:
                trials.lead(trial)
        return trial.fits

    def bar(key: Key) -> None:
        notes.append(f"{key}: exceeds the tolerance in FP8 (found by bisection)")

    search_level(order, changes, trials.tolerance.first_order, fits, bar)
    if is_timed and found is not None and not trials.lead_if_faster(found):
        notes.append(_NO_FASTER)


# --- packing ---


class _PackableCalls(Listener):
    """Note which ops that can be packed are called, and in which modules."""

    def __init__(self, module: Callable[[], str]) -> None:
        self.seen: dict[tuple[str, str], None] = {}
        self._module = module

    def begin(self, call: Call) -> None:
        if call.ruled is not None and any(kind.name == "saved" for kind in call.ruled.added):
            self.seen[call.op, self._module()] = None


def measure_packing(task: Task, decisions: Decisions, best: Policy) -> dict[Key, PackedUnit]:
    """Return what each unit keeps in one step under the policy, with all that can be packed on its saved list."""
    paths = {id(module): plain_path(name) for name, module in task.model.named_modules()}

    def module() -> str:
        return paths.get(id(modules.innermost), "") if decisions.per_module else ""

    part = lists.kind_of("saved").report
    assert part is not None
    kept, calls = part().recording(lambda path: module()), _PackableCalls(module)
    policy = best.replace(saved=frozenset({"*"}), saved_recipe=as_policy(PRESET).saved_recipe)
    task.from_the_start()
    with running_uncompiled(), task.under(policy), listen(calls, kept):
        loss = task.loss(task.batches[0])
        if loss.requires_grad:
            loss.backward()
    rows = {(row.op, row.module): row for row in kept.rows()}
    found = {}
    for op, path in calls.seen:
        key, row = Key(op, path if decisions.per_module else None), rows.get((op, path))
        found[key] = PackedUnit(*key) if row is None else PackedUnit(*key, row.nbytes, row.left, row.error)
    return found


def search_packing(trials: Trials, notes: list[str], units: Mapping[Key, PackedUnit], best: Trial) -> None:
    """Pack what units save for backward, under the lists of `best`.

    Packing changes no loss before the first step of training: what it does is seen in the trials alone.

    Raises:
        Over: the search's time or number of trials is spent.
    """
    gained = sum(unit.nbytes - unit.left for unit in units.values())
    if gained < trials.least_gain:
        notes.append(_LITTLE_KEPT if gained else _NOTHING_KEPT)
        return
    # a unit that keeps what others do gains nothing by itself, and keeps it unpacked where it stays out
    errors = {key: unit.error if math.isfinite(unit.error) else sys.float_info.max for key, unit in units.items()}
    order = greedy_order({key: max(unit.nbytes - unit.left, 1) for key, unit in units.items()}, errors)
    chosen: frozenset[Key] = frozenset()

    def fits(keys: frozenset[Key], last: Key | None) -> bool:
        nonlocal chosen
        listed = _lines_can_pack(keys, order)
        name = _name(listed, order, "packed", last)
        trial = trials.packing(name, _packing_policy(best.policy, listed, order), listed, best)
        if trial.fits:
            chosen = keys
        return trial.fits

    def bar(key: Key) -> None:
        notes.append(f"{key}: exceeds the tolerance with its activations packed (found by bisection)")

    search_level(order, errors, 0.0, fits, bar)
    for key in sorted(chosen - _lines_can_pack(chosen, order)):
        notes.append(f"{key}: not packed, because an entry for it would also cover modules in which `{key.op}` must not be packed")


def _lines_can_pack(packed: frozenset[Key], order: Sequence[Key]) -> frozenset[Key]:
    """Return the units that lines can pack without the others: a line holds for the modules inside as well."""
    barred = set(order) - packed

    def holds_for(key: Key, other: Key) -> bool:
        return key.op == other.op and (not key.module or f"{other.module}.".startswith(f"{key.module}."))

    return frozenset(key for key in packed if not any(holds_for(key, other) for other in barred))


def _packing_policy(best: Policy, listed: frozenset[Key], order: Sequence[Key]) -> Policy:
    """Return the policy with these units on its saved list: an op by its name where all of its units are, else by the modules."""
    others = {key.op for key in set(order) - listed}
    lines = [ListEntry(key.op, "saved", scope=scope_of(key.module)) for key in sorted(listed) if key.module and key.op in others]
    named = frozenset(key.op for key in listed if key.op not in others)
    return best.replace(saved=named, saved_recipe=as_policy(PRESET).saved_recipe, scoped=(*best.scoped, *lines))


def _name(keys: frozenset[Key], order: Sequence[Key], where: str, last: Key | None) -> str:
    return f"{len(keys)} of {len(order)} {where}" + (f", {last}" if last is not None else "")
