"""The page of a search for lists: the trade-off of all trials, what each unit gains and changes, and the lists with their reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...core.formatting import NOTHING, count, dtype_name, size, typeset_duration
from ..pages import charts
from ..pages.html import render
from . import trade_off
from .files import list_by_unit, list_lines, units_by_line
from .reasons import ENDS, amount, by_gain, gain, percent, reason, runs_low
from .result import Trial, TuneResult, Unit

_BARS = 24
_COSTS = {"time": "time of a step", "memory": "bytes kept for backward"}
# above this many times float32's loss or cost the axis would show nothing else
_MOST = 20.0


def tuning_page(result: TuneResult) -> str:
    """The page, as HTML, of a search."""
    low = dtype_name(result.policy.dtype)
    ranked, listed = by_gain(result), list_by_unit(result)
    curve, left_out = _curve(result)
    return render(
        "tuning.html.j2",
        title="hmp tune",
        verdict=_verdict(result, low),
        made=vars(result),
        result=result,
        low=low,
        cards=_cards(result),
        ended=f"{ENDS[result.stopped].capitalize()}.",
        curve=curve,
        left_out=left_out,
        bars=_bars(ranked, listed, result, low),
        bars_all=len(ranked),
        lists=[(cast, *_split(result, cast)) for cast in result.policy.lists],
        units=[_unit(unit, listed.get(unit.name, ""), result) for unit in ranked],
        trials=[_trial(trial, result) for trial in result.trials],
        use=_use(result),
        has_fp8=any(unit.work_fp8 for unit in result.units),
    )


def _cost(trial: Trial, result: TuneResult) -> float | None:
    """What was made small, as a ratio to float32's; None where it was not measured."""
    base = result.trials[0]
    if result.objective == "time" and _is_emulated(trial):
        return None
    if result.objective == "memory":
        found = trial.saved_bytes / base.saved_bytes if base.saved_bytes else math.nan
    else:
        found = trial.ratio if trial.ratio is not None else trial.seconds / base.seconds if base.seconds else math.nan
    return found if math.isfinite(found) else None


def _is_emulated(trial: Trial) -> bool:
    """Whether a step had products in FP8 and was not timed for that: it takes what emulating them takes."""
    return bool(trial.fp8) and trial.ratio is None


def _worse(trial: Trial, result: TuneResult) -> float | None:
    """How far the loss is from float32's or, where that is what was bounded, the metric below it; None where it is not finite."""
    found = trial.metric_change if result.tolerance.metric is not None else abs(trial.loss_change)
    return found if found is not None and math.isfinite(found) else None


def _curve(result: TuneResult) -> tuple[str, list[str]]:
    """The figure, and the names of the trials that cannot be in it."""
    points, left_out = [], []
    named = {result.trials[0].name, result.best.name} | {trial.name for trial in result.trials if trial.low is None}
    for trial in result.trials:
        cost, worse = _cost(trial, result), _worse(trial, result)
        if cost is None or worse is None or worse > _MOST or cost > _MOST:
            left_out.append(trial.name)
            continue
        name = trial.name if trial.name in named else ""
        title = f"{trial.name}: {cost:.2f} of float32's {_COSTS[result.objective]}, {_said_worse(trial, result)}"
        points.append(trade_off.Point(cost, worse, trial.fits, name, trial.name == result.best.name, title))
    is_metric = result.tolerance.metric is not None
    allowed = result.tolerance.metric if is_metric else result.tolerance.loss
    cost_name = f"{_COSTS[result.objective]}, float32 = 1"
    worse_name = "metric worse than float32's" if is_metric else "loss away from float32's"
    if not points:
        return "", left_out
    return trade_off.trade_off(points, cost_name, worse_name, allowed), left_out


def _compared(change: float | None) -> str:
    """A change for the worse in words: a loss and a metric have their better sides at opposite ends."""
    if change is None or not math.isfinite(change):
        return percent(change)
    return "as float32" if not change else f"{percent(abs(change)).lstrip('+')} {'worse' if change > 0 else 'better'}"


def _said_worse(trial: Trial, result: TuneResult) -> str:
    """What was bounded, in words."""
    is_metric = result.tolerance.metric is not None
    return f"metric {_compared(trial.metric_change)}" if is_metric else f"loss {_compared(trial.loss_change)}"


def _verdict(result: TuneResult, low: str) -> str:
    """What came of the search, in a sentence."""
    best, cost = result.best, _cost(result.best, result)
    takes = {"time": "A step takes {:.2f} of float32's time", "memory": "A step keeps {:.2f} of float32's bytes for backward"}
    changes = [f"loss {_compared(best.loss_change)}"]
    changes += [f"metric {_compared(best.metric_change)}"] if best.metric_change is not None else []
    if best.fp8 and (cost is None or cost >= 1):
        moved = f"{result.share_in_fp8:.0%} of the products' work runs in FP8, in {count(len(best.fp8), 'unit')}"
        return f"{moved}; {' and '.join(changes)}, within the tolerance. What that gains is for a device to say that computes in FP8."
    if best is result.trials[0] or (best.low == () and not best.fp8) or cost is None or cost >= 1:
        saved = "was faster" if result.objective == "time" else "kept fewer bytes for backward"
        return f"Stay in float32: of {count(len(result.trials), 'trial')} none within the tolerance {saved}."
    units = "" if best.low is None else f", with {len(best.low)} of {count(len(result.units), 'unit')} in {low}"
    if best.fp8:
        units += f" and {len(best.fp8)}, {result.share_in_fp8:.0%} of the products' work, in FP8"
    if best.saved:
        units += f"{' and' if units else ', with'} {count(len(best.saved), 'unit')} packed"
    return f"{takes[result.objective].format(cost)}{units}; {' and '.join(changes)}, within the tolerance."


def _cards(result: TuneResult) -> list[tuple[str, str, str]]:
    """What came of it: heading, number, and what it is of."""
    best, base = result.best, result.trials[0]
    median = "median, FP8 emulated" if _is_emulated(best) else "median"
    timed = ("time of a step", typeset_duration(best.seconds), f"{median}, float32 {typeset_duration(base.seconds)}")
    found = [
        timed if best.ratio is None else ("time of a step", f"{best.ratio:.2f}", f"of float32's {typeset_duration(base.seconds)}"),
        (
            "kept for backward",
            f"{best.saved_bytes / base.saved_bytes:.2f}" if base.saved_bytes else "-",
            f"{size(best.saved_bytes)} of {size(base.saved_bytes)}",
        ),
        ("loss", _compared(best.loss_change), f"{best.loss:.5g}, float32 {base.loss:.5g}"),
    ]
    if best.metric is not None and best.metric_change is not None and base.metric is not None:
        found.append(("metric", _compared(best.metric_change), f"{best.metric:.5g}, float32 {base.metric:.5g}"))
    if best.gradient_cosine is not None:
        found.append(("cosine of the gradients", f"{best.gradient_cosine:.4f}", "with float32's, at the start"))
    if best.low is not None:
        found.append(("units in the low dtype", str(len(best.low)), f"of {len(result.units)} measured"))
    if best.saved:
        found.append(("units packed for backward", str(len(best.saved)), f"of {len(result.packed)}, {result.policy.saved_recipe}"))
    if best.fp8:
        found.append(("products' work in FP8", f"{result.share_in_fp8:.0%}", f"{len(best.fp8)} units, {result.policy.fp8_recipe}"))
    return found


def _bars(ranked: list[Unit], listed: Mapping[str, str], result: TuneResult, low: str) -> str:
    """The units with most gain, and those with least where there are more than can be drawn."""
    finite = [unit for unit in ranked if runs_low(unit)]
    shown = finite if len(finite) <= _BARS else [*finite[: _BARS - 6], *finite[-6:]]
    if not shown:
        return ""
    dtypes = {"bf16": low, "fp32": "float32", "fp8": "float8_e4m3fn"}
    bars = [
        charts.Bar(
            unit.name,
            dtypes.get(listed.get(unit.name, ""), "other"),
            gain(unit, result.objective),
            amount(gain(unit, result.objective), result.objective).replace("us", "µs"),
            unit.sensitivity,
            percent(unit.sensitivity),
        )
        for unit in shown
    ]
    title = {"time": "gain in a step, casts counted", "memory": "bytes less to keep for backward"}[result.objective]
    return charts.gain_and_change(bars, title, result.tolerance.loss)


def _split(result: TuneResult, cast: str) -> tuple[list[tuple[str, str]], list[str]]:
    """The lines of a list that were decided, with their reasons, and the others."""
    lines = list_lines(result)[cast]  # type: ignore[index]
    decided = {name for on, name in units_by_line(result) if on == cast}
    if cast == "saved" and result.best.saved:
        decided = {name for name, _ in lines}
    return [(name, _typeset(str(reason))) for name, reason in lines if name in decided], [name for name, _ in lines if name not in decided]


def _unit(unit: Unit, listed: str, result: TuneResult) -> dict[str, Any]:
    return {
        **vars(unit),
        "module": "(outside every module)" if unit.module == "" else unit.module or "",
        "listed": listed,
        "gain": gain(unit, "time"),
        "gain_text": amount(gain(unit, "time"), "time").replace("us", "µs"),
        "saved": gain(unit, "memory"),
        "saved_text": amount(gain(unit, "memory"), "memory"),
        "change_text": percent(unit.sensitivity),
        "finite": runs_low(unit),
        "change_fp8_text": percent(unit.sensitivity_fp8) if unit.work_fp8 else NOTHING,
        "why": reason(listed, [unit], result).why if listed else "",
    }


def _typeset(text: str) -> str:
    return text.replace(" us ", " µs ")


def _trial(trial: Trial, result: TuneResult) -> dict[str, Any]:
    return {
        **vars(trial),
        "low": None if trial.low is None else len(trial.low),
        "fp8": len(trial.fp8),
        "loss": trial.loss if math.isfinite(trial.loss) else None,
        "change": percent(trial.loss_change),
        "change_value": trial.loss_change if math.isfinite(trial.loss_change) else 1e300,
        "worse": percent(trial.metric_change),
        "worse_value": 1e300 if trial.metric_change is None else trial.metric_change,
        "seconds": trial.seconds if math.isfinite(trial.seconds) else None,
        "cost": _cost(trial, result),
        "verdict": trial.verdict,
        "chosen": trial.name == result.best.name,
    }


def _use(result: TuneResult) -> str:
    folder = result.folder or "tuned"
    if result.policy.scoped:
        return f'hmp.apply(model, "{folder}")  # lines of single modules hold inside a model'
    return f'hmp.convert(policy="{folder}")  # or hmp run --policy {folder} script.py'
