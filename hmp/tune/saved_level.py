"""The last level where bytes are the objective: under the lists that were found, what ops keep for backward is packed.

Packing changes no loss before the first step of training: what it does is seen in the verified runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..lists import ListEntry, Policy, as_policy, plain_path
from ..observing import Modules
from ..report.kept_packed import KeptRows
from ..session import Observer, Op, OpRule, observed_by
from ..uncompiled import running_uncompiled
from .bisection import bisect
from .decisions import Decisions, Key, scope_of
from .task import Task
from .trial import Packed, Trial
from .trials import Trials

PRESET = "saved8"  # which has the recipe, the one of the eight-bit ones with the least error
_NOTHING = "nothing packed for backward: no op keeps tensors that are large enough"
_LITTLE = "nothing packed for backward: it would save too little"


class _Calls(Observer):
    """An observer that notes which ops that can be packed are called, and in which modules."""

    def __init__(self, module: Callable[[], str]) -> None:
        self.seen: dict[tuple[str, str], None] = {}
        self._module = module

    def around(self, wrapper: Op, rule: OpRule) -> Op:
        if not rule.saved:
            return wrapper

        def noted(*args: object, **kwargs: object) -> object:
            self.seen[rule.op, self._module()] = None
            return wrapper(*args, **kwargs)

        return noted


def measured(task: Task, decisions: Decisions, best: Policy) -> tuple[Packed, ...]:
    """What each unit keeps in one step under the policy with all that can be packed on its saved list, the least error first."""
    modules, paths = Modules(), {id(module): plain_path(name) for name, module in task.model.named_modules()}

    def module() -> str:
        return paths.get(id(modules.innermost), "") if decisions.per_module else ""

    kept, calls = KeptRows(module), _Calls(module)
    policy = best.replace(saved=frozenset({"*"}), saved_recipe=as_policy(PRESET).saved_recipe)
    task.from_the_start()
    with running_uncompiled(), task.under(policy), observed_by(calls), modules.watch(), kept.watch():
        loss = task.loss(task.batches[0])
        if loss.requires_grad:
            loss.backward()
    rows = {(row.op, row.module): row for row in kept.rows()}
    found = []
    for op, path in calls.seen:
        key, row = Key(op, path if decisions.per_module else None), rows.get((op, path))
        found.append(Packed(*key) if row is None else Packed(*key, row.nbytes, row.left, row.error))
    return tuple(sorted(found, key=lambda unit: (unit.error, unit.name)))


def packed(trials: Trials, notes: list[str], units: Sequence[Packed], best: Trial) -> None:
    """Makes the trials, each `best` with what units keep packed, those first that packing changes least. What was found goes to the trials,
    and why not to `notes`. Over where the budget is spent."""
    gained = sum(unit.nbytes - unit.left for unit in units)
    if gained < trials.least_gain:
        notes.append(_LITTLE if gained else _NOTHING)
        return
    order = [Key(unit.op, unit.module) for unit in units]

    def fits(chosen: frozenset[Key], last: Key | None = None) -> bool:
        listed = _listed(chosen, order)
        name = f"{len(listed)} of {len(order)} packed" + (f", {last}" if last is not None else "")
        return trials.packing(name, _policy(best.policy, listed, order), listed, best).fits

    def bar(key: Key) -> None:
        notes.append(f"{key}: with what it keeps packed the tolerance is left, found by bisection")

    chosen = bisect(frozenset(), order, fits, bar)
    for key in sorted(chosen - _listed(chosen, order)):
        notes.append(f"{key}: not packed, as a line for it would hold for units of `{key.op}` that are left out, too")


def _listed(packed: frozenset[Key], order: Sequence[Key]) -> frozenset[Key]:
    """Those of the units that lines can pack and leave out the others: a line holds for the modules inside as well."""
    barred = set(order) - packed

    def holds_for(key: Key, other: Key) -> bool:
        return key.op == other.op and (not key.module or f"{other.module}.".startswith(f"{key.module}."))

    return frozenset(key for key in packed if not any(holds_for(key, other) for other in barred))


def _policy(best: Policy, listed: frozenset[Key], order: Sequence[Key]) -> Policy:
    """The policy with these units on its saved list: an op by its name where all of its units are, else by the modules."""
    others = {key.op for key in set(order) - listed}
    lines = [ListEntry(key.op, "saved", scope=scope_of(key.module)) for key in sorted(listed) if key.module and key.op in others]
    named = frozenset(key.op for key in listed if key.op not in others)
    return best.replace(saved=named, saved_recipe=as_policy(PRESET).saved_recipe, scoped=(*best.scoped, *lines))
