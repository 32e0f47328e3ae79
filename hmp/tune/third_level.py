"""The third level: of the lists that were found, as much of the products' work as the tolerance allows moves to FP8.

Work is what counts, since most machines emulate FP8: there a step's time says nothing of what it takes where FP8 is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from ..fp8 import RECIPES, is_real
from .bisection import bisect
from .decisions import Decisions, Key
from .task import Task
from .trial import Trial, Unit
from .trials import Trials

_NOTHING = "no product in FP8: none of the decided ops has one whose dimensions FP8 takes, and that is finite there"
_NO_FASTER = "no product in FP8: within the tolerance, but no faster on this device"

# The trial, under its name, of units in FP8, of others in the low dtype, and of ops that are left as the start has them.
Evaluate = Callable[[str, frozenset[Key], frozenset[Key], frozenset[str]], Trial]


class ThirdLevel:
    """Moves units to FP8, those first that change the loss least. What was found goes to the trials, and why not to `notes`."""

    def __init__(self, task: Task, decisions: Decisions, trials: Trials, evaluate: Evaluate, notes: list[str]) -> None:
        self._trials = trials
        self._evaluate = evaluate
        self._notes = notes
        start = decisions.start
        self._is_timed = trials.objective == "time" and is_real(start.fp8_kernel, task.device, RECIPES[start.fp8_recipe])

    def go(self, units: Mapping[Key, Unit], low: frozenset[Key], left: frozenset[str]) -> None:
        """Makes the trials, beginning with these units in the low dtype. Over where the budget is spent."""
        able = [key for key, unit in units.items() if unit.work_fp8 and math.isfinite(unit.sensitivity_fp8)]
        order = sorted(able, key=lambda key: (units[key].sensitivity_fp8, str(key)))
        if not order:
            self._notes.append(_NOTHING)
            return
        most, found = 0, None

        def fits(fp8: frozenset[Key], last: Key | None = None) -> bool:
            nonlocal most, found
            name = f"{len(fp8)} of {len(order)} in FP8" + (f", {last}" if last is not None else "")
            trial = self._evaluate(name, fp8, low - fp8, left - {key.op for key in fp8})
            moved = sum(units[key].work_fp8 for key in fp8)
            if trial.fits and moved > most:
                most, found = moved, trial
                if not self._is_timed:
                    self._trials.lead(trial)
            return trial.fits

        if not fits(frozenset(order)):
            good = self._by_first_order(order, units)
            if not good or not fits(good):
                good = frozenset()
            bisect(good, [key for key in order if key not in good], fits, self._bar)
        if self._is_timed and found is not None and not self._trials.lead_if_faster(found):
            self._notes.append(_NO_FASTER)

    def _by_first_order(self, order: Sequence[Key], units: Mapping[Key, Unit]) -> frozenset[Key]:
        """The first of the units whose changes of the loss, to first order, add up to what is allowed at most."""
        sums = itertools.accumulate(units[key].sensitivity_fp8 for key in order)
        return frozenset(key for key, total in zip(order, sums, strict=True) if total <= self._trials.tolerance.first_order)

    def _bar(self, key: Key) -> None:
        self._notes.append(f"{key}: in FP8 the tolerance is left, found by bisection")
