"""The search: measure each unit, solve for the set, verify by really running, repair what fails, and keep the cheapest that fits."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..benchmark.variants import in_force
from ..errors import HmpError, NonFiniteError
from ..numerics.nonfinite import detect_nonfinite
from ..policy import Policy, as_policy
from . import files
from .budget import Budget, Over
from .decisions import Decisions, Key
from .journal import Journal, key_of
from .probe import probe
from .progress import Progress, shown
from .result import Flow, Objective, Stopped, Trial, TuneResult, Unit
from .solver import Model, scipy, solve
from .task import Task, cosine
from .tolerance import Tolerance, as_tolerance

FLOAT32 = "float32"
_NO_LISTS = Policy(name=FLOAT32)
_ROUNDS = 5
# A step that is less than this faster is taken to be as fast.
_NOISE = 0.02
_MOST_FLIPS = 16
_IN_RUN_OFF = 4
_FIRST_LIMIT = 0.01


def run(
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    tolerance: float | Mapping[str, float] | Tolerance,
    metric: Callable[[Any], Any] | None,
    optimizer: Callable[[Any], Any] | None,
    budget: float | str | None,
    start: str | Path | Policy,
    per_module: bool,
    ops: Collection[str] | None,
    objective: Objective,
    steps: int | None,
    seed: int,
    folder: str | Path | None,
    resume: bool,
    progress: bool | Progress | None,
) -> TuneResult:
    """What `hmp.tune()` returns."""
    scipy()
    if objective not in ("time", "memory"):
        raise HmpError(f'objective={objective!r} is unknown; give "time" (of a step) or "memory" (kept for backward)')
    bounds = as_tolerance(tolerance, metric is not None)
    begin = as_policy(start)
    if begin.scoped:
        raise HmpError(f"policy {begin.name!r} has scoped lines, which tune() would write anew; give one without them as start=")
    allowed = Budget(budget)
    decisions = Decisions(begin, ops, per_module)
    task = Task(model, batches, loss, metric, optimizer, steps, seed)
    target = None if folder is None else Path(folder)
    key = key_of(
        [(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()], _sum(model), len(task.batches), task.trains, task.steps,
        seed, bounds, objective, begin.fingerprint, per_module, sorted(decisions.ops), torch.__version__, str(task.device),
    )  # fmt: skip
    shows = shown(progress)
    journal = Journal(target, key, resume)
    if journal.result is not None:
        return journal.result
    search = Search(task, decisions, bounds, objective, allowed, journal, shows, key, target)
    try:
        with task.prepared(), in_force(begin):
            try:
                search.go()
                stopped: Stopped = "solved"
            except Over:
                stopped = "budget"
        return search.end(stopped)
    finally:
        shows.close()


def _sum(model: torch.nn.Module) -> float:
    """A number that tells one state of the parameters from another."""
    with torch.no_grad():
        return math.fsum(float(p.detach().double().abs().sum()) for p in model.parameters() if p.layout is torch.strided)


class Search:
    """One search. `go()` makes trials until there is nothing left to try; what is known by then is in `result()` at any time."""

    def __init__(
        self,
        task: Task,
        decisions: Decisions,
        tolerance: Tolerance,
        objective: Objective,
        budget: Budget,
        journal: Journal,
        progress: Progress,
        key: str,
        folder: Path | None,
    ) -> None:
        self._task = task
        self._decisions = decisions
        self._tolerance = tolerance
        self._objective = objective
        self._budget = budget
        self._journal = journal
        self._progress = progress
        self._key = key
        self._folder = folder
        self._trials: dict[str, Trial] = {}
        self._best: Trial | None = None
        self._beaten = False
        self._units: dict[Key, Unit] = {}
        self._flows: tuple[Flow, ...] = ()
        self._model = Model({}, {}, {})
        self._fastest: frozenset[Key] = frozenset()  # what the solver would choose if every set were accurate enough
        self._barred: set[Key] = set()
        self._failed: list[frozenset[Key]] = []
        self._notes: list[str] = []
        self._expected = 8

    def go(self) -> None:
        """Makes the trials. Over where the budget is spent."""
        self._progress.stage("float32 and the policies that there are")
        self._reference = self._journal.trial(FLOAT32, _NO_LISTS) or self._in_float32()
        self._note(self._reference)
        self._progress.stage("measuring each op in both precisions")
        self._measure()
        self._try(frozenset(), "nothing low")
        start = self._decisions.start
        self._evaluated(start.name, start, None)
        if self._decisions.all:  # it has lists of its own for what is not decided
            devices = as_policy("autocast").replace(dtype=start.dtype)
            self._evaluated(devices.name, devices, None)
        self._progress.stage("solving and verifying")
        self._fastest = solve(self._model)
        self._expected += 2 * len(self._fastest).bit_length() + min(len(self._units), _MOST_FLIPS)
        self._verified(self._fastest)
        self._progress.stage("trying single ops")
        self._flip()
        self._run_off()

    # --- trials ---

    def _in_float32(self) -> Trial:
        outcome = self._outcome(None)
        if outcome.failure:
            raise HmpError(f"in float32 {outcome.failure}: there is nothing to keep to. Make the step train in float32 first")
        return Trial(FLOAT32, _NO_LISTS, None, outcome.loss, 0.0, outcome.metric, None if outcome.metric is None else 0.0,
            None if outcome.gradient is None else 1.0, outcome.seconds, outcome.saved_bytes, True, ratio=1.0)  # fmt: skip

    @functools.cached_property
    def _gradient(self) -> tuple[torch.Tensor, ...] | None:
        """float32's."""
        return self._task.gradient()

    def _outcome(self, policy: Policy | None) -> Any:
        self._budget.take()
        self._task.from_the_start()
        return self._task.run(policy)

    def _try(self, low: frozenset[Key], name: str) -> Trial:
        """The trial of these units in the low dtype."""
        trial = self._evaluated(name, self._decisions.policy(low, name), low)
        if not trial.fits and low:
            self._failed.append(low)
        return trial

    def _evaluated(self, name: str, policy: Policy, low: frozenset[Key] | None) -> Trial:
        for trial in self._trials.values():
            if trial.name != FLOAT32 and trial.policy == policy:
                return trial
        known = self._journal.trial(name, policy)
        if known is not None:
            return self._note(known)
        try:
            outcome = self._outcome(policy)
        except (RuntimeError, ValueError, TypeError) as error:  # torch refuses, or the user's code does
            trial = self._failure(name, policy, low, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return self._note(trial)
        trial = self._judged(name, policy, low, outcome)
        return self._note(self._timed(trial) if trial.fits and self._objective == "time" else trial)

    def _timed(self, trial: Trial) -> Trial:
        """The trial with its time beside float32's; the best so far runs in the same rounds, and must be beaten in most of them."""
        best = self._best
        if best is None:
            return replace(trial, ratio=statistics.median(self._ratios([trial])[0]))
        own, bests = self._ratios([trial, best])
        trial = replace(trial, ratio=statistics.median(own))
        won = [mine / its for mine, its in zip(own, bests, strict=True)]
        if statistics.median(won) < 1 - _NOISE and sum(each < 1 for each in won) >= 0.8 * len(won):
            self._beaten = True
        return trial

    def _judged(self, name: str, policy: Policy, low: frozenset[Key] | None, outcome: Any) -> Trial:
        reference = self._reference
        loss_change = (outcome.loss - reference.loss) / max(abs(reference.loss), 1e-12)
        metric_change = None
        if outcome.metric is not None and reference.metric is not None:
            metric_change = (reference.metric - outcome.metric) / max(abs(reference.metric), 1e-12)
        similar = cosine(outcome.gradient, self._gradient)
        why = outcome.failure or self._tolerance.exceeded(loss_change, metric_change, similar)
        return Trial(
            name=name,
            policy=policy,
            low=None if low is None else tuple(sorted(map(str, low))),
            loss=outcome.loss,
            loss_change=loss_change,
            metric=outcome.metric,
            metric_change=metric_change,
            gradient_cosine=similar,
            seconds=outcome.seconds,
            saved_bytes=outcome.saved_bytes,
            fits=not why,
            why=why,
        )

    def _failure(self, name: str, policy: Policy, low: frozenset[Key] | None, why: str) -> Trial:
        names = None if low is None else tuple(sorted(map(str, low)))
        return Trial(name, policy, names, math.nan, math.nan, None, None, None, math.nan, 0, False, why)

    def _note(self, trial: Trial) -> Trial:
        same = sum(1 for name in self._trials if name.partition(" (")[0] == trial.name)
        if same:
            trial = replace(trial, name=f"{trial.name} ({same + 1})")
        self._trials[trial.name] = trial
        self._choose(trial)
        best = self._best
        if self._folder is not None and best is not None:
            files.write(self.result("interrupted"), self._folder)
        told = "" if best is None else f"{best.name}: {self._cost(best):.3f} of float32's"
        self._progress.step(len(self._trials), max(self._expected, len(self._trials) + 1), told)
        return trial

    def _choose(self, trial: Trial) -> None:
        """Makes the trial the best where it is."""
        if not trial.fits or trial.name == FLOAT32:
            return
        if self._best is None or self._beaten or (self._objective == "memory" and trial.saved_bytes < self._best.saved_bytes):
            self._best = trial
        self._beaten = False

    def _ratios(self, trials: Sequence[Trial], rounds: int = _ROUNDS) -> list[list[float]]:
        """The time of a step under each trial's policy as a ratio to float32's in the same round; one list a trial."""
        self._task.from_the_start()
        samplers = [self._task.timer(None), *(self._task.timer(trial.policy) for trial in trials)]
        found: list[list[float]] = [[] for _ in trials]
        for at in range(rounds):
            first = at % len(samplers)
            seconds = {i % len(samplers): samplers[i % len(samplers)]() for i in range(first, first + len(samplers))}
            for i, ratios in enumerate(found):
                ratios.append(seconds[i + 1] / seconds[0])
        return found

    def _cost(self, trial: Trial) -> float:
        """What is made small, as a ratio to float32."""
        if self._objective == "time":
            return math.inf if trial.ratio is None else trial.ratio
        return trial.saved_bytes / max(self._reference.saved_bytes, 1)

    # --- what is known of the units ---

    def _measure(self) -> None:
        if self._journal.units:
            self._units = {self._decisions.key(unit.op, unit.module or ""): unit for unit in self._journal.units}
            self._flows = self._journal.flows
        else:
            found = probe(self._task, self._decisions)
            self._decisions.found({key: measured.calls for key, measured in found.units.items()})
            for key, measured in found.units.items():
                sensitivity = measured.sensitivity(found.loss)
                self._units[key] = Unit(
                    op=key.op,
                    module=key.module,
                    calls=measured.calls,
                    error=measured.error,
                    sensitivity=self._tried(key, found.loss) if sensitivity is None else sensitivity,
                    seconds_float32=measured.seconds_float32,
                    seconds_low=measured.seconds_low,
                    cast_seconds=measured.cast_seconds,
                    saved_bytes=measured.saved_bytes,
                )
            self._flows = tuple(Flow(str(a), str(b), flow.seconds, flow.bytes) for (a, b), flow in found.flows.items())
        self._decisions.found({key: unit.calls for key, unit in self._units.items()})
        by_name = {str(key): key for key in self._units}
        is_time = self._objective == "time"
        self._model = Model(
            # where nothing is gained float32 is the better choice
            {key: _seconds(unit) if is_time else 1.0 - unit.saved_bytes for key, unit in self._units.items()},
            {(by_name[f.source], by_name[f.target]): f.seconds for f in self._flows} if is_time else {},
            {key: unit.sensitivity for key, unit in self._units.items()},
        )

    def _tried(self, key: Key, loss: float) -> float:
        """The relative change of the first batch's loss with this unit alone in the low dtype: where no gradient tells."""
        self._task.from_the_start()
        try:
            with self._task.under(self._decisions.policy((key,))), torch.no_grad():
                changed = float(self._task.loss(self._task.batches[0]))
        except RuntimeError:
            return math.inf
        return abs(changed - loss) / max(abs(loss), 1e-12) if math.isfinite(changed) else math.inf

    # --- the search ---

    def _verified(self, low: frozenset[Key]) -> None:
        """Finds a large part of `low` that fits: without the ops that make NaN, then by bisection."""
        trial = self._try(low, f"solver, {len(low)} low")
        while not trial.fits and "finite" in trial.why:
            culprits = self._makers_of_nan(low) - self._barred
            if not culprits:
                break
            self._bar(culprits, "makes NaN or Inf in the low dtype")
            low = solve(self._model, barred=self._barred, failed=self._failed)
            trial = self._try(low, f"solver without {_listed(self._barred)}")
        if trial.fits:
            return
        self._bisect(low)
        again = solve(self._model, barred=self._barred, failed=self._failed)
        self._try(again, f"solver without {_listed(self._barred)}")

    def _makers_of_nan(self, low: frozenset[Key]) -> frozenset[Key]:
        """The units of `low` that make NaN or Inf of finite numbers, as far as the first finding tells."""
        self._budget.take()
        self._task.from_the_start()
        try:
            with detect_nonfinite():
                self._task.run(self._decisions.policy(low))
        except NonFiniteError as error:
            op = self._decisions.op_of(error.finding.op)
            keys = {key for key in low if key.op == op}
            inside = {key for key in keys if key.module and error.finding.module.endswith(key.module)}
            return frozenset(inside or keys)
        except (RuntimeError, ValueError, TypeError):
            return frozenset()
        return frozenset()

    def _bisect(self, low: frozenset[Key]) -> None:
        """Bars one unit after another: the first whose addition, in the order of sensitivity, is one too many, until the rest fits."""
        limit = self._tolerance.loss or self._tolerance.metric or _FIRST_LIMIT
        good = solve(self._model, limit=limit, barred=self._barred | (self._units.keys() - low))
        if not self._try(good, f"first order, {len(good)} low").fits:
            good = frozenset()
        rest = sorted(low - good, key=lambda key: (self._model.sensitivities[key], str(key)))
        while rest:
            if self._try(good | set(rest), f"bisection, {len(good) + len(rest)} low").fits:
                return
            fits, fails = 0, len(rest)
            while fails - fits > 1:
                middle = (fits + fails) // 2
                if self._try(good | set(rest[:middle]), f"bisection, {len(good) + middle} low, {_listed(rest[middle - 1 : middle])}").fits:
                    fits = middle
                else:
                    fails = middle
            self._bar({rest[fits]}, "found by bisection: with it the tolerance is left")
            good, rest = good | set(rest[:fits]), rest[fits + 1 :]

    def _bar(self, keys: Iterable[Key], why: str) -> None:
        for key in sorted(keys, key=str):
            self._barred.add(key)
            self._notes.append(f"{key}: {why}")

    def _flip(self) -> None:
        """Tries the best with one unit changed, the most expensive units first, until nothing gets better: costs that were measured alone
        need not add up, nor errors."""
        is_time = self._objective == "time"
        order = sorted(self._units, key=lambda key: -(self._units[key].seconds_float32 if is_time else abs(self._units[key].saved_bytes)))
        before = None
        while before is not self._best:
            before = self._best
            for key in order[:_MOST_FLIPS]:
                low = frozenset() if self._best is None else self._low(self._best)
                if key in low or math.isfinite(self._model.sensitivities[key]):
                    changed = low ^ {key}
                    self._try(changed, f"{'with' if key in changed else 'without'} {key}, {len(changed)} low")

    def _run_off(self) -> None:
        """Times the best and those that were nearly as fast beside each other once more."""
        if self._objective != "time" or self._best is None:
            return
        fitting = sorted((t for t in self._trials.values() if t.fits and t.name not in (FLOAT32, self._best.name)), key=self._cost)
        near = [self._best, *fitting[: _IN_RUN_OFF - 1]]
        for trial, ratios in zip(near, self._ratios(near, 2 * _ROUNDS - 1), strict=True):
            self._trials[trial.name] = replace(trial, ratio=statistics.median(ratios))
        self._best = min((self._trials[trial.name] for trial in near), key=self._cost)

    def _low(self, trial: Trial) -> frozenset[Key]:
        """The units that ran in the low dtype."""
        if trial.low is None:
            return self._decisions.low_of(trial.policy, self._units)
        return frozenset(key for key in self._units if str(key) in trial.low)

    # --- the end ---

    def end(self, stopped: Stopped) -> TuneResult:
        """The result, written into the folder. HmpError where nothing was within the tolerance."""
        if self._best is None:
            lacking = "give a larger budget" if stopped == "budget" else "decide more ops, or allow more"
            nothing = self._trials.get("nothing low")
            also = f"; with all decided ops in float32: {nothing.why}" if nothing is not None else ""
            raise HmpError(f"no lists were found within the tolerance ({self._tolerance}){also}; {lacking}")
        result = self.result(stopped)
        if self._folder is not None:
            files.write(result, self._folder)
        return result

    def result(self, stopped: Stopped) -> TuneResult:
        """What is known now."""
        best = self._best
        assert best is not None
        low = self._low(best)
        predicted = self._model.cost(self._fastest)
        return TuneResult(
            policy=best.policy.replace(name="tuned"),
            best=best,
            trials=tuple(self._trials.values()),
            units=tuple(self._units.values()),
            flows=self._flows,
            tolerance=self._tolerance,
            objective=self._objective,
            stopped=stopped,
            start=self._decisions.start.name,
            seed=self._task.seed,
            steps=self._task.steps if self._task.trains else 0,
            predicted=predicted,
            left=self._model.cost(low) - predicted,
            device=str(self._task.device),
            torch=torch.__version__,
            notes=tuple(self._notes),
            folder=None if self._folder is None else str(self._folder),
            key=self._key,
        )


def _seconds(unit: Unit) -> float:
    """What the unit costs in the low dtype beside float32, in seconds; a gain within the noise is none."""
    return unit.seconds_low + unit.cast_seconds - unit.seconds_float32 * (1 - _NOISE)


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(sorted(map(str, keys)))
