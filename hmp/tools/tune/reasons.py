"""Why a unit is on its list, in three columns: what it gains, what it does to the loss, what kept it in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.formatting import NOTHING, dtype_name, duration, size
from .result import LEAST_GAIN, Objective, Stopped, TuneResult, Unit, least_gain

# How a search ended.
ENDS = {
    Stopped.SOLVED: "no change of one unit made it cheaper within the tolerance",
    Stopped.BUDGET: "the budget is spent; a larger one goes on from here",
    Stopped.INTERRUPTED: "interrupted; the same call goes on from here",
}


def gain(unit: Unit, objective: Objective) -> float:
    """Return how many seconds a step is shorter, or bytes fewer it keeps, with the unit in the low-precision dtype.

    -inf where it cannot be.
    """
    if not runs_low(unit):
        return -math.inf
    return float(unit.saved_bytes) if objective == Objective.MEMORY else unit.seconds_float32 - unit.seconds_low - unit.cast_seconds


def by_gain(result: TuneResult) -> list[Unit]:
    """Return the units of a search, the most gain first."""
    return sorted(result.units, key=lambda unit: (-gain(unit, result.objective), unit.name))


def amount(value: float, objective: Objective) -> str:
    """Seconds or bytes with their unit and the sign of less than nothing."""
    if not math.isfinite(value):
        return NOTHING
    text = (size if objective == Objective.MEMORY else duration)(abs(value))
    return "0" if text == NOTHING else f"-{text}" if value < 0 else text


def percent(change: float | None) -> str:
    """Return a relative change with its sign."""
    if change is None:
        return NOTHING
    if not math.isfinite(change):
        return "not finite"
    return "under 0.01%" if 0 < abs(change) < 5e-5 else f"{change:+.2%}"


def runs_low(unit: Unit) -> bool:
    """Return True if the unit can run in the low-precision dtype, with finite results."""
    return all(map(math.isfinite, (unit.error, unit.sensitivity, unit.seconds_low)))


class Reason(NamedTuple):
    """The columns after an entry of a list: what it gains in a step, what it changes, and why it is on it; "" for not measured."""

    gain: str = ""
    change: str = ""
    why: str = ""

    def __str__(self) -> str:
        return " | ".join(filter(None, self))


def reason(cast: str, units: Sequence[Unit], result: TuneResult) -> Reason:
    """Return why these units are on the list `cast`: gain and change are those of the low-precision dtype or, on the FP8 list, of FP8."""
    if cast == "fp8":
        work = sum(unit.work for unit in result.units)
        moved = sum(unit.work_fp8 for unit in units) / work if work else 0.0
        return Reason(f"{moved:.0%} of the products' work", percent(sum(unit.sensitivity_fp8 for unit in units)), "chosen")
    low, objective = dtype_name(result.policy.dtype), result.objective
    runs = [unit for unit in units if runs_low(unit)]
    if not runs:
        never = all(math.isinf(unit.seconds_low) for unit in units)
        return Reason(why=f"cannot run in {low}" if never else f"gives NaN or Inf in {low}")
    gained, change = sum(gain(unit, objective) for unit in runs), sum(unit.sensitivity for unit in runs)
    return Reason(amount(gained, objective), percent(change), "chosen" if cast == "bf16" else _why_float32(units, gained, change, result))


def _why_float32(units: Sequence[Unit], gained: float, change: float, result: TuneResult) -> str:
    """Return what keeps these units out of the low-precision dtype."""
    if any(note.startswith(f"{unit.name}: ") for unit in units for note in result.notes):
        return "beyond the tolerance in a trial"
    if result.tolerance.loss is not None and change > result.tolerance.loss:
        return "changes the loss too much"
    if gained <= 0:
        return "gains nothing"
    ops = {unit.op for unit in units}
    of_ops = sum(max(gain(unit, result.objective), 0.0) for unit in result.units if unit.op in ops)
    if result.trials and of_ops < least_gain(result.trials[0], result.objective):
        return f"gains less than {LEAST_GAIN:.1%} of float32's {'bytes' if result.objective == 'memory' else 'time'}"
    return "not chosen"


def reason_packed(name: str, result: TuneResult) -> Reason:
    """Return what packing what is kept by the ops of this entry brings, and what it changes."""
    if not result.best.saved:
        return Reason(why=f"as in {Path(result.start).name}")
    units = [unit for unit in result.packed if name in (unit.op, unit.name) and unit.name in result.best.saved]
    nbytes, left = (sum(getattr(unit, each) for unit in units) for each in ("nbytes", "left"))
    if not nbytes:
        return Reason(why="keeps what others do")
    return Reason(f"{size(nbytes)} -> {size(left)}", f"{max(unit.error for unit in units):.1e}", "chosen")
