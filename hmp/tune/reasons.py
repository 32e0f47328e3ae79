"""Why a unit is on its list, in few words: what it gains, what it does to the loss, what kept it in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..formatting import NOTHING, count, dtype_name, duration, size
from .result import TuneResult
from .trial import LEAST_GAIN, Objective, Trial, Unit, least_gain

# How a search ended.
ENDS = {
    "solved": "no change of one unit made it cheaper within the tolerance",
    "budget": "the budget is spent; a larger one goes on from here",
    "interrupted": "interrupted; the same call goes on from here",
}


def gain(unit: Unit, objective: Objective) -> float:
    """How many seconds a step is shorter, or bytes fewer it keeps, with the unit in the low dtype; -inf where it cannot be."""
    if not runs_low(unit):
        return -math.inf
    return float(unit.saved_bytes) if objective == "memory" else unit.seconds_float32 - unit.seconds_low - unit.cast_seconds


def by_gain(result: TuneResult) -> list[Unit]:
    """The units of a search, the most gain first."""
    return sorted(result.units, key=lambda unit: (-gain(unit, result.objective), unit.name))


def amount(value: float, objective: Objective) -> str:
    """Seconds or bytes with their unit and the sign of less than nothing."""
    if not math.isfinite(value):
        return NOTHING
    text = (size if objective == "memory" else duration)(abs(value))
    return "0" if text == NOTHING else f"-{text}" if value < 0 else text


def percent(change: float | None) -> str:
    """A relative change with its sign."""
    if change is None:
        return NOTHING
    if not math.isfinite(change):
        return "not finite"
    return "under 0.01%" if 0 < abs(change) < 5e-5 else f"{change:+.2%}"


def runs_low(unit: Unit) -> bool:
    """Whether the unit can run in the low dtype, with finite results."""
    return all(map(math.isfinite, (unit.error, unit.sensitivity, unit.seconds_low)))


def why_low(units: Sequence[Unit], objective: Objective) -> str:
    """What these units bring in the low dtype, and what that costs in accuracy."""
    runs = [unit for unit in units if runs_low(unit)]
    if not runs:
        return f"cannot run in the low dtype, {_calls(units)}"
    gained = sum(gain(unit, objective) for unit in runs)
    brings = "costs" if gained < 0 else "saves" if objective == "memory" else "gain"
    error, loss = max(unit.error for unit in runs), sum(unit.sensitivity for unit in runs)
    bring = f"{brings} {amount(abs(gained), objective)} a step" if gained else "gains nothing"
    return f"{bring}, error {error:.1e}, loss {percent(loss)}, {_calls(units)}"


def why(cast: str, units: Sequence[Unit], result: TuneResult) -> str:
    """Why these units are on the list `cast`, "" for a list that no unit is moved to."""
    if cast == "fp8":
        return _why_fp8(units, result)
    if cast == "bf16":
        return why_low(units, result.objective)
    return _why_float32(units, result) if cast == "fp32" else ""


def _why_fp8(units: Sequence[Unit], result: TuneResult) -> str:
    """What these units move to FP8, and what that costs in accuracy."""
    work = sum(unit.work for unit in result.units)
    moved = sum(unit.work_fp8 for unit in units) / work if work else 0.0
    error, loss = max(unit.error_fp8 for unit in units), sum(unit.sensitivity_fp8 for unit in units)
    return f"{moved:.0%} of the products' work, error {error:.1e}, loss {percent(loss)}, {_calls(units)}"


def why_packed(name: str, result: TuneResult) -> str:
    """What packing what is kept by the ops of this line brings, and what it changes."""
    if not result.best.saved:
        return f"as in {Path(result.start).name}"
    units = [unit for unit in result.packed if name in (unit.op, unit.name) and unit.name in result.best.saved]
    nbytes, left = (sum(getattr(unit, each) for unit in units) for each in ("nbytes", "left"))
    if not nbytes:
        return "keeps what others do"
    return f"{size(nbytes)} -> {size(left)} a step, error {max(unit.error for unit in units):.1e}"


def _why_float32(units: Sequence[Unit], result: TuneResult) -> str:
    """What keeps these units out of the low dtype."""
    low, objective = dtype_name(result.policy.dtype), result.objective
    runs = [unit for unit in units if runs_low(unit)]
    if not runs:
        never = all(math.isinf(unit.seconds_low) for unit in units)
        return f"{f'cannot run in {low}' if never else f'gives NaN or Inf in {low}'}, {_calls(units)}"
    gained, loss = sum(gain(unit, objective) for unit in runs), sum(unit.sensitivity for unit in runs)
    found = []
    if result.tolerance.loss is not None and abs(loss) > result.tolerance.loss:
        found.append(f"too sensitive: loss {percent(loss)} in {low}")
    if gained <= 0:
        less = "keeps no bytes less" if objective == "memory" else f"slower by {amount(-gained, objective)} a step"
        found.append(f"{less} in {low}")
    found += [note.partition(": ")[2] for unit in units for note in result.notes if note.startswith(f"{unit.name}: ")]
    found = found or _beyond(units, result) or _no_cheaper(units, result)
    if not found and _is_little(units, result):
        found = [f"gains less than {LEAST_GAIN:.1%} of float32's {'bytes' if objective == 'memory' else 'time'}"]
    if not found:
        found = [f"not chosen: gain {amount(gained, objective)} a step by itself, loss {percent(loss)}"]
    return f"{'; '.join(found)}, {_calls(units)}"


def _is_little(units: Sequence[Unit], result: TuneResult) -> bool:
    """Whether the ops of these units gain too little in all modules together."""
    ops = {unit.op for unit in units}
    gained = sum(max(gain(unit, result.objective), 0.0) for unit in result.units if unit.op in ops)
    return bool(result.trials) and gained < least_gain(result.trials[0], result.objective)


def _beyond(units: Sequence[Unit], result: TuneResult) -> list[str]:
    """What was beyond the tolerance in the trial that differs least from the chosen one and had one of these in the low dtype."""
    trial, others = _nearest(units, result, fits=False)
    return [] if trial is None else [f"with it{others}: {trial.why or 'beyond the tolerance'}"]


def _no_cheaper(units: Sequence[Unit], result: TuneResult) -> list[str]:
    """What the trial cost that differs least from the chosen one and had one of these in the low dtype."""
    trial, others = _nearest(units, result, fits=True)
    if trial is None:
        return []
    if result.objective == "memory":
        if trial.saved_bytes < result.best.saved_bytes:
            return []
        return [f"with it{others}: {size(trial.saved_bytes)} kept, {size(result.best.saved_bytes)} as chosen"]
    if trial.ratio is None or result.best.ratio is None:
        return []
    return [f"with it{others}: {trial.ratio:.2f} of float32's time, {result.best.ratio:.2f} as chosen"]


def _nearest(units: Sequence[Unit], result: TuneResult, fits: bool) -> tuple[Trial | None, str]:
    """The trial with one of these in the low dtype that has fewest other units there than the chosen one, and how many those are."""
    names, kept = {unit.name for unit in units}, set(result.best.low or ())
    tried = [trial for trial in result.trials if trial.low and trial.fits is fits and names & set(trial.low)]
    if not tried or result.best.low is None:
        return None, ""
    nearest = min(tried, key=lambda trial: len(kept ^ set(trial.low or ())))
    others = len(kept.symmetric_difference(nearest.low or ()) - names)
    return nearest, f" and {count(others, 'other change')}" if others else ""


def _calls(units: Sequence[Unit]) -> str:
    calls = sum(unit.calls for unit in units)
    where = f" in {len(units)} modules" if len(units) > 1 else ""
    return f"{count(calls, 'call')}{where}"
