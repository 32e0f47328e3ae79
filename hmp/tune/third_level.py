"""The third level: of the lists that were found, as much of the products' work as the tolerance allows moves to FP8.

Work is what counts, since most machines emulate FP8: there a step's time says nothing of what it takes where FP8 is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from ..fp8 import RECIPES, is_real
from .bisection import bisect
from .decisions import Decisions, Key
from .task import Task
from .trial import Unit
from .trials import Trials

_NOTHING = "no product in FP8: none of the decided ops has one whose dimensions FP8 takes, and that is finite there"
_NO_FASTER = "no product in FP8: within the tolerance, but no faster on this device"


def in_fp8(
    task: Task,
    decisions: Decisions,
    trials: Trials,
    notes: list[str],
    units: Mapping[Key, Unit],
    low: frozenset[Key],
    left: frozenset[str],
) -> None:
    """Makes the trials that move units to FP8, those first that change the loss least, beginning with `low` in the low dtype and the ops
    `left` as the start has them. What was found goes to the trials, and why not to `notes`. Over where the budget is spent."""
    able = [key for key, unit in units.items() if unit.work_fp8 and math.isfinite(unit.sensitivity_fp8)]
    order = sorted(able, key=lambda key: (units[key].sensitivity_fp8, str(key)))
    if not order:
        notes.append(_NOTHING)
        return
    start = decisions.start
    is_timed = trials.objective == "time" and is_real(start.fp8_kernel, task.device, RECIPES[start.fp8_recipe])
    most, found = 0, None

    def fits(fp8: frozenset[Key], last: Key | None = None) -> bool:
        nonlocal most, found
        name = f"{len(fp8)} of {len(order)} in FP8" + (f", {last}" if last is not None else "")
        others, stay = low - fp8, left - {key.op for key in fp8}
        trial = trials.of(name, decisions.policy(others, name, stay, fp8), others, stay, fp8)
        moved = sum(units[key].work_fp8 for key in fp8)
        if trial.fits and moved > most:
            most, found = moved, trial
            if not is_timed:
                trials.lead(trial)
        return trial.fits

    if not fits(frozenset(order)):
        sums = itertools.accumulate(units[key].sensitivity_fp8 for key in order)
        good = frozenset(key for key, total in zip(order, sums, strict=True) if total <= trials.tolerance.first_order)
        if not good or not fits(good):
            good = frozenset()
        rest = [key for key in order if key not in good]
        bisect(good, rest, fits, lambda key: notes.append(f"{key}: in FP8 the tolerance is left, found by bisection"))
    if is_timed and found is not None and not trials.lead_if_faster(found):
        notes.append(_NO_FASTER)
