"""The search: measure each unit, search level by level, verify by really running, and keep the cheapest that fits."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...core import lists as kinds
from ...core.policy import Policy, as_policy, scopes
from ...errors import HmpError, NonFiniteError
from ..benchmark.variants import policy_active
from ..extras import lacking
from ..formatting import provenance
from ..nonfinite.detect import detect_nonfinite
from . import lists
from .decisions import Decisions, Key
from .levels import greedy_order, measure_packing, search_fp8, search_level, search_packing
from .probe import Measured, probe
from .result import Objective, PackedUnit, Stopped, Tolerance, Trial, TuneResult, Unit, as_tolerance
from .task import Task
from .trials import NOISE, Budget, Journal, Over, Trials, search_key

__all__ = ["Budget", "Task", "as_tolerance", "decided", "run"]

MOST_FLIPS = 16


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
    if objective not in ("time", "memory", "bytes"):
        raise HmpError(
            f'objective= expected "time" (of a step), "memory" (activation memory) or "bytes" (packed activations), got {objective!r}'
        )
    if isinstance(levels, str) or set(levels) not in ({"bf16", "fp32"}, {"fp8", "bf16", "fp32"}):
        raise HmpError(f'levels= expected ("bf16", "fp32") or ("fp8", "bf16", "fp32"), got {levels!r}')
    policy, in_fp8, packs = as_policy(start, model), "fp8" in levels, objective == "bytes"
    besides = "" if in_fp8 else ', and levels=("fp8", "bf16", "fp32")'
    for which, has, remedy in (
        ("an FP8 list", policy.entries("fp8"), f'such as "autocast"{besides}'),
        ("entries with a scope", policy.scoped, 'such as "autocast"'),
        ("a saved list", packs and policy.entries("saved"), 'such as "autocast"'),
    ):
        if has:
            raise HmpError(f"start= expected a policy without {which}, got {policy.name!r}; give another one, {remedy}")
    shared = scopes.shared(model) if per_module and isinstance(model, torch.nn.Module) else ()
    return Decisions(policy, ops, per_module, shared, in_fp8=in_fp8, packs=packs)


def run(
    decisions: Decisions,
    budget: Budget,
    tolerance: Tolerance,
    task: Task,
    *,
    objective: Objective,
    folder: Path | None,
    resume: bool,
    progress: bool | None,
) -> TuneResult:
    """Search, or go on with the search in the folder, and return what was found."""
    if folder is not None and not (folder / lists.JSON_FILE).exists() and any((folder / f"{cast}.txt").exists() for cast in kinds.names()):
        raise HmpError(f"{folder}: has lists that tune() did not write and would replace; give another folder")
    key = _key(task, decisions, tolerance, objective)
    shows, journal = Progress(progress), Journal(folder, key, resume)
    try:
        with task.prepared(), policy_active(decisions.start):
            if journal.result is not None and folder is not None:
                journal.check(journal.result.trials[0].loss, task.run(None).loss)
                result = replace(journal.result, folder=str(folder))
                lists.write(result, folder)  # the lists may be gone, or changed
                return result
            search = Search(task, decisions, Trials(task, tolerance, objective, budget, journal), journal, shows, key, folder)
            stopped: Stopped = Stopped.SOLVED
            try:
                search.go()
            except Over:
                stopped = Stopped.BUDGET
        return search.end(stopped)
    finally:
        shows.close()


def _key(task: Task, decisions: Decisions, tolerance: Tolerance, objective: Objective) -> dict[str, str]:
    start = decisions.start
    levels = f"fp8 ({start.fp8_recipe}, {start.fp8_kernel}), bf16, fp32" if decisions.in_fp8 else "bf16, fp32"
    settings = {"tolerance": tolerance, "objective": "bytes" if decisions.packs else objective, "levels": levels, "seed": task.seed}
    settings |= {"start": f"{start.name} {start.fingerprint}", "per_module": decisions.per_module}
    return search_key(task, settings | {"choice of ops": ", ".join(sorted(decisions.ops))})


class Search:
    """One search. `go()` makes trials until there is nothing left to try; what is known by then is in `result()` at any time."""

    def __init__(
        self,
        task: Task,
        decisions: Decisions,
        trials: Trials,
        journal: Journal,
        progress: Progress,
        key: dict[str, str],
        folder: Path | None,
    ) -> None:
        self._task = task
        self._decisions = decisions
        self._trials = trials
        self._journal = journal
        self._progress = progress
        self._key = key
        self._folder = folder
        self._units: dict[Key, Unit] = {}
        self._packed: tuple[PackedUnit, ...] = ()
        self._notes: list[str] = []
        self._expected = 8

    def go(self) -> None:
        """Make the trials. Raise Over when the budget is spent."""
        self._progress.stage("running float32 and the presets")
        self._trials.tell = self._tell
        self._trials.begin()
        self._progress.stage("measuring each op in both precisions")
        self._measure()
        self._try(frozenset(), "nothing low")
        start = self._decisions.start
        self._trials.of(start.name, start)
        if self._decisions.all:  # these say what is done with ops that are not decided, too
            devices = as_policy("autocast", self._task.model).replace(dtype=start.dtype)
            self._trials.of(devices.name, devices)
            if self._trials.objective == Objective.TIME:  # where nothing is cast no op need be looked at
                self._trials.of("no lists", Policy(name="no lists", dtype=start.dtype), frozenset())
        self._progress.stage("searching for ops in the low-precision dtype")
        self._search_low()
        self._progress.stage("trying single ops")
        self._flip()
        self._trials.run_off()
        if self._decisions.in_fp8:
            self._progress.stage("moving matrix multiplications to FP8")
            search_fp8(self._task, self._decisions, self._trials, self._notes, self._units, *self._choice())
        best = self._trials.best
        if self._decisions.packs and best is not None:
            self._progress.stage("packing saved activations")
            packed = measure_packing(self._task, self._decisions, best.policy)
            self._packed = tuple(packed.values())
            search_packing(self._trials, self._notes, packed, best)

    def _try(self, low: frozenset[Key], name: str, left: frozenset[str] = frozenset()) -> Trial:
        """Return the trial of these units in the low-precision dtype and, but for the ops that are left, of the others in float32."""
        return self._trials.of(name, self._decisions.policy(low, name, left), low, left)

    def _tell(self) -> None:
        """Write down what is known, and print it."""
        best, made = self._trials.best, len(self._trials.made)
        if self._folder is not None and best is not None:
            lists.write(self.result(Stopped.INTERRUPTED), self._folder)
        told = "" if best is None else f"{best.name}: {self._trials.cost(best):.3f} of float32's"
        self._progress.step(made, max(self._expected, made + 1), told)

    # --- what is known of the units ---

    def _measure(self) -> None:
        if self._journal.units:
            self._units = {Key(unit.op, unit.module): unit for unit in self._journal.units}
        else:
            found = probe(self._task, self._decisions)
            self._decisions.found({key: measured.calls for key, measured in found.units.items()})
            self._units = {key: self._unit(key, measured, found.loss) for key, measured in found.units.items()}
        self._decisions.found({key: unit.calls for key, unit in self._units.items()})

    def _unit(self, key: Key, measured: Measured, loss: float) -> Unit:
        in_low, in_fp8 = measured.low.sensitivity(loss), measured.fp8.sensitivity(loss)
        unit = Unit(
            op=key.op,
            module=key.module,
            calls=measured.calls,
            error=measured.low.error,
            sensitivity=self._tried(self._decisions.policy((key,)), loss) if in_low is None else in_low,
            seconds_float32=measured.seconds_float32,
            seconds_low=measured.seconds_low,
            cast_seconds=measured.cast_seconds,
            saved_bytes=measured.saved_bytes,
            work=measured.work,
        )
        if not measured.work_fp8:
            return unit
        if in_fp8 is None:
            in_fp8 = self._tried(self._decisions.policy((), fp8=(key,)), loss)
        return replace(unit, work_fp8=measured.work_fp8, error_fp8=measured.fp8.error, sensitivity_fp8=in_fp8)

    def _tried(self, policy: Policy, loss: float) -> float:
        """Return the relative change of the first batch's loss under the policy, which has one unit in few bits.

        For units without a gradient.
        """
        self._task.from_the_start()
        try:
            with self._task.under(policy), torch.no_grad():
                changed = float(self._task.loss(self._task.batches[0]))
        except Exception:  # whatever torch or the user's code says of what the low-precision dtype gives
            return math.inf
        return abs(changed - loss) / max(abs(loss), 1e-12) if math.isfinite(changed) else math.inf

    # --- the search ---

    def _search_low(self) -> None:
        """Find the units for the low-precision dtype: without those that make NaN, then by bisection."""
        changes = {key: unit.sensitivity for key, unit in self._units.items()}
        order = greedy_order(_gains(self._units, self._trials.objective, self._trials.least_gain), changes)
        self._expected += 2 * len(order).bit_length() + min(len(self._units), MOST_FLIPS)

        def fits(units: frozenset[Key], last: Key | None) -> bool:
            name = f"{len(units)} of {len(order)} low" + (f", {last}" if last is not None else "")
            return self._try(units, name).fits

        while order:
            trial = self._try(frozenset(order), f"{len(order)} low")
            culprits = frozenset() if trial.fits or "finite" not in trial.why else self._makers_of_nan(frozenset(order))
            if not culprits:
                break
            self._bar(culprits, "makes NaN or Inf in the low-precision dtype")
            order = [key for key in order if key not in culprits]
        search_level(
            order,
            changes,
            self._trials.tolerance.first_order,
            fits,
            lambda key: self._bar({key}, "exceeds the tolerance (found by bisection)"),
        )

    def _makers_of_nan(self, low: frozenset[Key]) -> frozenset[Key]:
        """Return the units of `low` that make NaN or Inf of finite numbers, as far as the first finding shows."""
        self._trials.budget.take()
        try:
            with detect_nonfinite():
                self._task.run(self._decisions.policy(low))
        except NonFiniteError as error:
            op = self._decisions.op_of(error.finding.op)
            keys = {key for key in low if key.op == op}
            found = f".{scopes.plain_path(error.finding.module)}"
            inside = {key for key in keys if key.module and found.endswith(f".{key.module}")}
            return frozenset(inside or keys)
        except Exception:
            return frozenset()
        return frozenset()

    def _bar(self, keys: Iterable[Key], why: str) -> None:
        self._notes += [f"{key}: {why}" for key in sorted(keys, key=str)]

    def _flip(self) -> None:
        """Try the best with one unit changed, the most expensive units first, until nothing gets better.

        Costs that were measured alone need not add up, nor errors. What is on none of the start's lists may also be left to run in what its
        inputs come in.
        """
        is_time = self._trials.objective == Objective.TIME
        order = sorted(self._units, key=lambda key: -(self._units[key].seconds_float32 if is_time else abs(self._units[key].saved_bytes)))
        free = self._decisions.left_of(self._decisions.start, self._units)
        low, _ = self._choice()
        self._try(low, f"{len(low)} low, others as in {self._decisions.start.name}", free - {key.op for key in low})
        before = None
        while before is not self._trials.best:
            before = self._trials.best
            for key in order[:MOST_FLIPS]:
                low, left = self._choice()
                if key in low or math.isfinite(self._units[key].sensitivity):
                    changed = low ^ {key}
                    self._try(changed, f"{'with' if key in changed else 'without'} {key}, {len(changed)} low", left - {key.op})
                low, left = self._choice()
                if key.op in free and key not in low:
                    verb = "casting" if key.op in left else "leaving"
                    self._try(low, f"{verb} {key.op}, {len(low)} low", left ^ {key.op})

    def _choice(self) -> tuple[frozenset[Key], frozenset[str]]:
        """Return the units that are low in the best, and the ops that it leaves."""
        best = self._trials.best
        if best is None:
            return frozenset(), frozenset()
        low = self._low(best)
        left = frozenset(best.left) if best.low is not None else self._decisions.left_of(best.policy, self._units)
        return low, left - {key.op for key in low}

    def _low(self, trial: Trial) -> frozenset[Key]:
        """Return the units that ran in the low-precision dtype."""
        if trial.low is None:
            return self._decisions.low_of(trial.policy, self._units)
        return frozenset(key for key in self._units if str(key) in trial.low)

    # --- the end ---

    def end(self, stopped: Stopped) -> TuneResult:
        """Return the result, written into the folder. Raise HmpError where nothing was within the tolerance."""
        if self._trials.best is None:
            lacking = "give a larger budget" if stopped == Stopped.BUDGET else "decide more ops, or raise the tolerance"
            nothing = self._trials.made.get("nothing low")
            also = f"; with all decided ops in float32: {nothing.why}" if nothing is not None else ""
            raise HmpError(f"no lists were found within the tolerance ({self._trials.tolerance}){also}; {lacking}")
        if stopped == Stopped.BUDGET and self._decisions.in_fp8 and not any(trial.fp8 for trial in self._trials.made.values()):
            self._notes.append("no matrix multiplication moved to FP8: the budget was spent before that was tried")
        if stopped == Stopped.BUDGET and self._decisions.packs and not any(trial.saved for trial in self._trials.made.values()):
            self._notes.append("no activations packed: the budget was spent before that was tried")
        result = self.result(stopped)
        if self._folder is not None:
            lists.write(result, self._folder)
        return result

    def result(self, stopped: Stopped) -> TuneResult:
        """Return what is known now."""
        best = self._trials.best
        assert best is not None
        return TuneResult(
            policy=best.policy.replace(name="tuned"),
            best=best,
            trials=tuple(self._trials.made.values()),
            units=tuple(self._units.values()),
            packed=self._packed,
            tolerance=self._trials.tolerance,
            objective=self._trials.objective,
            stopped=stopped,
            start=self._decisions.start.name,
            seed=self._task.seed,
            steps=self._task.steps if self._task.trains else 0,
            device=str(self._task.device),
            notes=tuple(self._notes),
            folder=None if self._folder is None else str(self._folder),
            key=self._key,
            model=self._task.model._get_name(),
            **provenance(),
        )


def _gains(units: Mapping[Key, Unit], objective: Objective, least: float) -> dict[Key, float]:
    """Return what each unit gains in the low-precision dtype, in seconds or bytes of a step; less than `least` in total is nothing."""
    gains = {key: float(unit.saved_bytes) if objective == Objective.MEMORY else _seconds(unit) for key, unit in units.items()}
    by_op: dict[str, float] = {}
    for key, gain in gains.items():
        by_op[key.op] = by_op.get(key.op, 0.0) + max(gain, 0.0)
    return {key: gain if by_op[key.op] >= least else 0.0 for key, gain in gains.items()}


def _seconds(unit: Unit) -> float:
    """Return the seconds that the unit gains in the low-precision dtype; a gain within the noise does not count."""
    return unit.seconds_float32 * (1 - NOISE) - unit.seconds_low - unit.cast_seconds


class Progress:
    """Shows stages and trials on stderr: for True, and for None if stderr is a terminal."""

    def __init__(self, progress: bool | None) -> None:
        if not (progress is None or isinstance(progress, bool)):
            raise HmpError(f"invalid progress={progress!r}: expected True, False or None")
        stderr = sys.stderr  # None under pythonw
        is_terminal = stderr is not None and stderr.isatty()
        self._is_shown = stderr is not None and (is_terminal if progress is None else progress)
        self._bar: Any = None
        if self._is_shown and is_terminal and not lacking("tune", "tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(desc="hmp tune", file=stderr, leave=False, unit="trial", dynamic_ncols=True)

    def stage(self, text: str) -> None:
        """Show that a stage begins."""
        if self._bar is not None:
            self._bar.set_description(f"hmp tune: {text}")
        else:
            self._say(text)

    def step(self, done: int, total: int, best: str) -> None:
        """Of about `total` trials, `done` are made."""
        if self._bar is not None:
            self._bar.n, self._bar.total = done, total
            self._bar.set_postfix_str(best)
        else:
            self._say(f"{done} of about {total}" + (f": {best}" if best else ""))

    def close(self) -> None:
        """Close the progress bar: the search has ended."""
        if self._bar is not None:
            self._bar.close()

    def _say(self, text: str) -> None:
        if self._is_shown:
            print(f"hmp tune: {text}", file=sys.stderr, flush=True)
