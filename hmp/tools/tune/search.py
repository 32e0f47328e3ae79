"""tune(): the cheapest op lists that keep a model within a tolerance of float32, verified on the user's own task.

The search measures each unit, searches list by list, verifies by really running, and keeps the cheapest that fits.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...core import lists
from ...core.lists import ListKind
from ...core.policy.entries import ListName
from ...core.policy.policy import Policy, as_policy
from ...errors import HmpError, OpListError
from ..benchmark import check_numbers, described, policy_active, rotated
from ..formatting import provenance
from .decisions import LOW, WIDE, Choice, Decisions, Key, moved
from .probe import Measured, probe, probe_added
from .result import Tolerance, Trial, TuneResult, Unit, as_tolerance, check_folder, write
from .task import Outcome, Task

# A step that is less than this faster is taken to be as fast.
NOISE = 0.02
# Of float32's bytes or time: what an op gains less than this is not worth what it does to the loss.
LEAST_GAIN = 0.005
_ROUNDS = 5
_FLOAT32 = "float32"
_NOT_TRIED = "not tried"


def tune(  # noqa: PLR0913
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    tolerance: float | Mapping[str, float] = 0.01,
    metric: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    seconds: float | None = None,
    max_trials: int | None = None,
    start: str | Path | Policy = "autocast",
    per_module: bool = False,
    ops: Collection[str] | None = None,
    levels: Collection[str] = ("bf16", "fp32"),
    objective: str = "time",
    steps: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool | None = None,
) -> TuneResult:
    """Search for the cheapest op lists that keep a model within a tolerance of float32.

    Each trial trains or evaluates the model under one policy, from the same state and seed. The search moves ops to the low-precision
    dtype, and then to further lists, in a fixed order: first those that change the loss least for what they save. Bisection finds how many
    can be moved within the tolerance. Afterwards model, random state and torch are as before.

    Args:
        model: the model, not compiled. No policy may be applied to it.
        batches: the batches, which are used in turns. A batch that is a mapping is copied for each use; its tensors are not.
        loss: a function; `loss(model, batch)` returns a scalar tensor.
        tolerance: how much worse than float32's the metric may be or, without a metric, how far the loss may differ, relative to float32's.
            Or a mapping with bounds for "loss" and "metric".
        metric: a function; `metric(model)` returns a number, larger is better (an accuracy). It is called after training, under the policy.
        optimizer: a function; `optimizer(model)` returns an optimizer of the model's parameters. With it a trial trains for `steps` steps,
            and its loss is the mean over the last pass over the batches. Without it, a trial evaluates: the mean over all batches.
        seconds: the search starts no new trial after this time.
        max_trials: the largest number of trials.
        start: the policy to start from. Ops that are not decided stay on its lists; its low-precision dtype and its recipes are used.
        per_module: decide each op separately in each module, and write entries with a scope.
        ops: the ops to decide. By default those that the model calls and that `start` or a preset has on its BF16 or FP32 list.
        levels: the lists that ops may move to: "bf16", "fp32" and those of further kinds; an error names them. As much as the tolerance
            allows moves there. If the objective is "time", and the device has kernels for it, these lists must also be faster.
        objective: what to minimise: the "time" of a step, its activation memory ("memory"), or its activation memory where what ops save
            may be in a form of fewer bits ("bytes").
        steps: the training steps of a trial. Default: one pass over the batches, but at least 20.
        seed: the seed of every trial.
        folder: a folder for the lists, and tune.json with all measurements. After Ctrl-C it has the best lists so far.
        progress: write a line on stderr for each trial. None: only on a terminal.

    Returns:
        The result: `policy` is the cheapest policy within the tolerance, `trials` and `units` hold the measurements.

    Raises:
        HmpError: for wrong arguments, if float32's loss is not finite, and if no lists are within the tolerance.

    Example:
        >>> net, data = torch.nn.Linear(4, 1), [torch.randn(8, 4)]
        >>> result = hmp.tune(net, data, loss=lambda model, x: model(x).square().mean(), objective="memory", max_trials=8)
        >>> folder = result.save("tuned")
    """
    if not (progress is None or isinstance(progress, bool)):
        raise HmpError(f"invalid progress={progress!r}: expected True, False or None")
    return Search(
        decisions=decided(model, start, ops=ops, per_module=per_module, levels=levels, objective=objective),
        budget=Budget(seconds, max_trials),
        tolerance=as_tolerance(tolerance, metric is not None),
        task=Task(model, batches, loss, metric, optimizer, steps, seed),
        objective="time" if objective == "time" else "memory",
        folder=check_folder(folder),
        shows_progress=sys.stderr is not None and (sys.stderr.isatty() if progress is None else progress),  # None under pythonw
    ).run()


class Over(Exception):
    """The search's time or number of trials is spent."""


class Budget:
    """How long a search may take; its time begins when this is made. Raise HmpError for numbers that cannot be a bound."""

    def __init__(self, seconds: float | None, max_trials: int | None) -> None:
        check_numbers(1.0 if seconds is None else seconds, max_trials=max_trials)
        self._until = math.inf if seconds is None else time.perf_counter() + seconds
        self._left = math.inf if max_trials is None else max_trials

    def take(self) -> None:
        """Spend one trial. Raise Over if none is left."""
        if self._left <= 0 or time.perf_counter() >= self._until:
            raise Over
        self._left -= 1


def decided(
    model: torch.nn.Module,
    start: str | Path | Policy,
    *,
    ops: Collection[str] | None,
    per_module: bool,
    levels: Collection[str],
    objective: str,
) -> Decisions:
    """Return what tune() decides. Raise HmpError for what cannot be searched, and for a policy with lists that a search writes."""
    offered = {kind: kind.level for kind in lists.kinds() if kind.level is not None}
    by_levels = [kind.name for kind, level in offered.items() if not level.objective]
    by_objective = [level.objective for level in offered.values() if level.objective]
    if objective not in ("time", "memory", *by_objective):
        others = "".join(f" or {each!r}" for each in by_objective)
        raise HmpError(f"objective= expected 'time' (of a step) or 'memory' (saved for backward){others}, got {objective!r}")
    if isinstance(levels, str) or not {LOW, WIDE} <= set(levels) <= {LOW, WIDE, *by_levels}:
        raise HmpError(f"levels= expected {LOW!r}, {WIDE!r} and any of {', '.join(map(repr, by_levels))}, got {levels!r}")
    policy = as_policy(start, model)
    chosen = [kind for kind, level in offered.items() if kind.name in levels or level.objective == objective]
    refused = [kind for kind in lists.kinds() if policy.entries(kind.name) and (kind in chosen or (kind.is_optional and not kind.adds))]
    for what in (*(f"a list of the kind {kind.name!r}" for kind in refused), *(["entries with a scope"] if policy.scoped else [])):
        raise HmpError(f'start= expected a policy without {what}, got {policy.name!r}; give another one, such as "autocast"')
    return Decisions(policy, ops, per_module, chosen)


def most_that_fit(order: Sequence[Key], fits: Callable[[frozenset[Key], Key | None], bool], bar: Callable[[Key], None]) -> None:
    """Try all units, then bisect for each unit that is one too many and go on without it.

    Args:
        order: The units, in the order in which they are added.
        fits: Makes the trial of a set of units, and says if it is within the tolerance. It is also given the unit that was added last
            where the set ends inside the order.
        bar: Is called with each unit that stays out.
    """
    good, rest = frozenset[Key](), list(order)
    while rest and not fits(good.union(rest), None):
        fitting, failing = 0, len(rest)  # how many of the rest still fit with the good ones, and how many do not
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if fits(good.union(rest[:middle]), rest[middle - 1]):
                fitting = middle
            else:
                failing = middle
        bar(rest[fitting])
        good, rest = good.union(rest[:fitting]), rest[fitting + 1 :]


@dataclass
class Search:
    """One search. `run()` makes trials until there is nothing left to try; what is known by then is in `result()` at any time."""

    task: Task
    decisions: Decisions
    tolerance: Tolerance
    objective: str
    budget: Budget
    folder: Path | None
    shows_progress: bool
    _units: dict[ListName, dict[Key, Unit]] = field(default_factory=dict)
    _trials: dict[str, Trial] = field(default_factory=dict)  # by the policy's fingerprint, float32's by its name
    _best: Trial | None = None

    def run(self) -> TuneResult:
        """Search, and return what was found."""
        stopped = "solved"
        with self.task.prepared(), policy_active(self.decisions.start):
            try:
                self.go()
            except Over:
                stopped = "budget"
            except KeyboardInterrupt:
                if self.folder is not None and self._best is not None:
                    write(self.result("interrupted"), self.folder)
                raise
        return self.end(stopped)

    def go(self) -> None:
        """Make the trials: float32, the presets, and then list by list. Raise Over when the budget is spent."""
        self._say("running float32 and the presets")
        self._note(_FLOAT32, self._in_float32())
        self._say("measuring each op")
        added = [kind for kind in self.decisions.levels if kind.adds]
        deciding = (lists.kind_of(LOW), *(kind for kind in self.decisions.levels if not kind.adds))
        found, loss = probe(self.task, self.decisions, deciding, self.objective == "memory")
        self.decisions.found({key: measured.calls for key, measured in found[LOW].items()})
        for kind in deciding:
            self._measured(kind, found[kind.name], loss)
        self._take("nothing low", self.decisions.policy({}), {})
        self._as_it_is(self.decisions.start)
        if self.decisions.all:  # these say what is done with ops that are not decided, too
            self._as_it_is(as_policy("autocast", self.task.model).replace(dtype=self.decisions.low))
            if self.objective == "time":  # where nothing is cast no op need be looked at
                self._as_it_is(Policy(name="no lists", dtype=self.decisions.low))
        for kind in deciding:
            self._descend(kind)
        for kind in added:
            if self._best is not None:
                self._measured(kind, probe_added(self.task, self.decisions, kind, self._best.policy), loss)
                self._descend(kind)

    def _in_float32(self) -> Trial:
        """Run float32, which all others are held against. Raise HmpError where it gives nothing to keep to."""
        before = self.task.batch_versions()
        self.budget.take()
        outcome = self.task.run(None)
        if self.task.batch_versions() != before:
            raise HmpError("loss(model, batch) writes into the batch's tensors, but every trial needs the same batch; write into clones")
        if outcome.failure:
            raise HmpError(f"the float32 baseline failed: {outcome.failure}; make the step train in float32 first")
        if self.objective == "memory" and not outcome.saved_bytes:
            raise HmpError(
                'a step saves nothing for backward, or torch does not report it, so there is nothing to minimise; give objective="time"'
            )
        metric_change = None if outcome.metric is None else 0.0
        return Trial(_FLOAT32, Policy(name=_FLOAT32), {}, outcome.loss, 0.0, outcome.metric, metric_change,
            outcome.seconds, outcome.saved_bytes, True, ratio=1.0)  # fmt: skip

    # --- what is known of the units ---

    def _measured(self, kind: ListKind, found: Mapping[Key, Measured], loss: float) -> None:
        gains = kind.level.gains if kind.level is not None else "bytes" if self.objective == "memory" else "seconds"
        self._units[kind.name] = {}
        for key, each in found.items():
            change = each.error if kind.adds else each.change(loss)
            why = each.cannot or _NOT_TRIED
            self._units[kind.name][key] = Unit(*key, kind.name, each.calls, each.gain, each.of, gains, each.error, change, why)

    # --- the search ---

    def _descend(self, kind: ListKind) -> None:
        """Move units to the list: first those that gain something, in the order of what they change for what they gain."""
        self._say(f"moving ops to the list {kind.name}")
        units = self._units.get(kind.name, {})
        order = self._order(kind, units.values())
        self._move(kind, order, {} if kind.name == LOW else self._choice())
        if kind.name == LOW:  # an op between others may spare casts, and gain nothing by itself
            low = self._choice().get(LOW, frozenset())
            rest = [unit for key, unit in units.items() if key not in low and key not in order and math.isfinite(unit.change)]
            rest.sort(key=lambda unit: (unit.change, unit.name))
            self._move(kind, [_key(unit) for unit in rest], self._choice())
            order += map(_key, rest)
        fitting = frozenset(key for key in order if units[key].why == _NOT_TRIED)
        listed = self.decisions.coverable(kind, fitting, order)
        for key, unit in units.items():
            if unit.why == _NOT_TRIED:
                barred = "an entry for it would hold for other modules, too" if key in order else "gains too little"
                units[key] = replace(unit, why="within the tolerance, but no gain" if key in listed else barred)

    def _order(self, kind: ListKind, units: Collection[Unit]) -> list[Key]:
        """Return the units that gain something and change a finite amount, the least change for its gain first."""
        of_ops: dict[str, float] = {}
        for unit in units:
            of_ops[unit.op] = of_ops.get(unit.op, 0.0) + max(unit.gain, 0.0)
        least = LEAST_GAIN * sum(unit.of for unit in units)
        if kind.adds:  # a unit that saves what others do gains nothing by itself, and keeps it as it is where it stays out
            able = list(units) if sum(of_ops.values()) > least else []
        else:
            able = [u for u in units if u.gain > NOISE * u.of and of_ops[u.op] >= least and math.isfinite(u.change)]
        return [_key(unit) for unit in sorted(able, key=lambda unit: (unit.change / max(unit.gain, 1e-12), unit.name))]

    def _move(self, kind: ListKind, order: list[Key], base: Choice) -> None:
        """Move as many of the units to the list as fit, the first ones first; the others are on the lists that they have in `base`."""
        best = self._best
        shows = kind.level is None or kind.level.shows(self.objective, self.decisions.start, self.task.device)

        def fits(keys: frozenset[Key], last: Key | None) -> bool:
            listed = self.decisions.coverable(kind, keys, order)
            choice = moved(base, listed, kind)
            name = f"{len(choice[kind.name])} on {kind.name}" + (f", {last}" if last is not None else "")
            if not kind.adds:
                return self._take(name, self.decisions.policy(choice, name), choice, shows=shows).fits
            assert best is not None
            return self._take(name, self.decisions.adding(best.policy, kind, listed), choice, best.taken, shows=shows).fits

        def bar(key: Key) -> None:
            units = self._units[kind.name]
            units[key] = replace(units[key], why="exceeds the tolerance (found by bisection)")

        most_that_fit(order, fits, bar)

    def _choice(self) -> Choice:
        """Return the choice that the best has."""
        if self._best is None:
            return {}
        units = [key for of_list in self._units.values() for key in of_list]
        return {name: frozenset(key for key in units if str(key) in names) for name, names in self._best.lists.items()}

    def _as_it_is(self, policy: Policy) -> None:
        self._take(policy.name, policy, self.decisions.choice_of(policy, self._units[LOW]), policy.name)

    def _take(self, name: str, policy: Policy, choice: Choice, taken: str = "", *, shows: bool = True) -> Trial:
        """Return the trial of the policy, made now or before. Raise Over if the budget is spent.

        It leads if it costs less than the best or, where its cost shows nothing, in any case.
        """
        at = policy.fingerprint
        if at in self._trials:
            return self._trials[at]
        names = {each.name for each in self._trials.values()}
        listed = {cast: tuple(sorted(map(str, units))) for cast, units in choice.items() if units}
        trial = replace(self._judged(name if name not in names else f"{name} ({len(names)})", policy), lists=listed, taken=taken)
        least = LEAST_GAIN * self._trials[_FLOAT32].saved_bytes
        leads = not shows or self._best is None or trial.saved_bytes <= self._best.saved_bytes - least
        if trial.fits and shows and self.objective == "time":
            trial, leads = self._timed(trial)
        if trial.fits and leads:
            self._best = trial
        self._note(at, trial)
        return trial

    def _judged(self, name: str, policy: Policy) -> Trial:
        """Run the task under the policy, and hold what comes of it against float32."""
        outcome, reference = self._outcome(policy), self._trials[_FLOAT32]
        loss_change = (outcome.loss - reference.loss) / max(abs(reference.loss), 1e-12)
        metric_change = None
        if outcome.metric is not None and reference.metric is not None:
            metric_change = (reference.metric - outcome.metric) / max(abs(reference.metric), 1e-12)
        why = outcome.failure or self.tolerance.exceeded(loss_change, metric_change)
        return Trial(name, policy, {}, outcome.loss, loss_change, outcome.metric, metric_change,
            outcome.seconds, outcome.saved_bytes, not why, why)  # fmt: skip

    def _outcome(self, policy: Policy) -> Outcome:
        """Return what came of the policy, or that nothing could."""
        self.budget.take()
        try:
            return self.task.run(policy)
        except OpListError as error:
            return Outcome(failure=str(error))
        except HmpError:
            raise
        except Exception as error:  # torch refuses, or the user's code does: it may assert that the loss is finite
            return Outcome(failure=described(error))

    def _timed(self, trial: Trial) -> tuple[Trial, bool]:
        """Return the trial with its time against float32's, and whether it is faster than the best, which runs in the same rounds."""
        policies = (None, trial.policy, *([self._best.policy] if self._best else []))
        seconds: list[list[float]] = [[] for _ in policies]
        for number in range(_ROUNDS):
            for at in rotated(range(len(policies)), number):
                seconds[at].append(self.task.timed(policies[at], trial.seconds))
        # of each round, and not of the medians: what slows a whole round down leaves its ratios as they are
        base, own, best = (seconds[at] for at in (0, 1, -1))  # without a best it is held against itself
        won = [mine / its for mine, its in zip(own, best, strict=True)]
        leads = self._best is None or (statistics.median(won) < 1 - NOISE and sum(each < 1 for each in won) >= 0.8 * len(won))
        return replace(trial, ratio=statistics.median(mine / its for mine, its in zip(own, base, strict=True))), leads

    # --- what is shown and written ---

    def _say(self, text: str) -> None:
        if self.shows_progress:
            print(f"hmp tune: {text}", file=sys.stderr, flush=True)

    def _note(self, at: str, trial: Trial) -> None:
        self._trials[at] = trial
        best = "" if self._best is None else f"; best so far: {self._best.name}"
        self._say(f"trial {len(self._trials)}, {trial.name}: {'fits' if trial.fits else trial.why}{best}")

    def end(self, stopped: str) -> TuneResult:
        """Return the result, written into the folder. Raise HmpError where nothing was within the tolerance."""
        if self._best is None:
            remedy = "give a larger budget" if stopped == "budget" else "decide more ops, or raise the tolerance"
            whys = "".join(f"; {trial.name}: {trial.why}" for trial in self._trials.values() if trial.why)
            raise HmpError(f"no lists were found within the tolerance ({self.tolerance}){whys}; {remedy}")
        result = self.result(stopped)
        if self.folder is not None:
            write(result, self.folder)
        return result

    def result(self, stopped: str) -> TuneResult:
        """Return what is known now."""
        best = self._best
        assert best is not None
        units = [unit for of_list in self._units.values() for unit in of_list.values()]
        return TuneResult(
            policy=best.policy.replace(name="tuned"),
            best=best,
            trials=tuple(self._trials.values()),
            units=tuple(replace(unit, why="chosen") if unit.name in best.on(unit.level) else unit for unit in units),
            tolerance=self.tolerance,
            objective=self.objective,
            stopped=stopped,
            start=self.decisions.start.name,
            seed=self.task.seed,
            steps=self.task.steps if self.task.trains else 0,
            device=str(self.task.device),
            folder=None if self.folder is None else str(self.folder),
            model=self.task.model._get_name(),
            **provenance(),
        )


def _key(unit: Unit) -> Key:
    return Key(unit.op, unit.module)
