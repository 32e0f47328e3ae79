"""The page of a search for lists: the trade-off of all trials, what each unit gains and changes, and the lists with their reasons."""

from __future__ import annotations

import math

from ...core.casting import dtype_name
from ..formatting import NOTHING, count
from ..formatting import duration as in_seconds
from ..pages.page import (
    Cell,
    Code,
    Items,
    Page,
    Part,
    Point,
    Section,
    Table,
    Text,
    TradeOff,
    error,
    made_of,
    module,
    nbytes,
    number,
    op,
    whole,
)
from .result import ENDS, Trial, TuneResult, amount, list_lines, percent, units_by_entry

_COSTS = {"time": "time of a step", "memory": "bytes kept for backward"}
# above this many times float32's loss or cost the axis would show nothing else
_MOST = 20.0


def tuning_page(result: TuneResult) -> Page:
    """Return what a search found."""
    low = dtype_name(result.policy.dtype)
    steps = f", {count(result.steps, 'step')} a trial" if result.steps else ""
    chosen = f"Chosen: {result.best.name}, of {count(len(result.trials), 'trial')}. {ENDS[result.stopped].capitalize()}."
    folder = result.folder or "tuned"
    use = f'hmp.apply(model, "{folder}")' + ("" if result.policy.scoped else f"  # or hmp run --policy {folder} script.py")
    bounds = str(result.tolerance) or "no bound"
    about = f"{low}; {bounds}; seed {result.seed}{steps}, from {result.start}; fingerprint {result.policy.fingerprint}"
    return Page(
        title="hmp tune",
        verdict=_verdict(result),
        made=made_of(vars(result)),
        policies=[(f"policy {result.policy.name}", about)],
        opening=[Text(chosen), Items(_names(result)), Code(use)],
        sections=[_curve(result), _trials(result), _units(result)],
    )


def _names(result: TuneResult) -> list[str]:
    """Return what was decided on each list, the most gain first, how many names are as they were, and where the lists are."""
    lines = []
    for cast, entries in list_lines(result).items():
        units = units_by_entry(result, cast)
        names = [name for name, _ in entries if units[name]]
        others = [f"{len(entries) - len(names)} not decided"] if len(entries) > len(names) else []
        lines.append(f"{cast}: {', '.join([*names, *others]) or 'nothing'}")
    return [*lines, *([f"lists: {result.folder}"] if result.folder else [])]


def _cost(trial: Trial, result: TuneResult) -> float | None:
    """Return what was made small, as a ratio to float32's; None where it was not measured."""
    base = result.trials[0]
    if result.objective == "memory":
        found = trial.saved_bytes / base.saved_bytes if base.saved_bytes else math.nan
    else:
        found = math.nan if trial.ratio is None else trial.ratio
    return found if math.isfinite(found) else None


def _worse(trial: Trial, result: TuneResult) -> float | None:
    """Return the change for the worse of the loss or, where that is what was bounded, of the metric; None where it is not finite."""
    found = trial.metric_change if result.tolerance.metric is not None else trial.loss_change
    return found if found is not None and math.isfinite(found) else None


def _curve(result: TuneResult) -> Section:
    """Return the trade-off of all trials, and the names of those that cannot be drawn."""
    named = {result.trials[0].name, result.best.name} | {trial.name for trial in result.trials if trial.taken}
    points = []
    for trial in result.trials:
        cost, worse = _cost(trial, result), _worse(trial, result)
        if cost is not None and worse is not None and abs(worse) <= _MOST and cost <= _MOST:
            points.append(Point(cost, worse, trial.fits, trial.name if trial.name in named else "", trial.name == result.best.name))
    loss, metric = result.tolerance.loss, result.tolerance.metric
    # a loss may not be far below float32's either
    allowed = [metric] if metric is not None else [] if loss is None else [loss, -loss]
    what = "loss" if metric is None else "metric"
    told = (
        f"Each point is a policy that the model ran under; above 0 its {what} is worse than float32's, below 0 better. Further left is "
        "cheaper. Dots are within the tolerance, crosses are not. The legend names the framed points. Beyond the dashed lines the scale is "
        "logarithmic. Trials without finite numbers, or without a time, are not drawn."
    )
    drawn = TradeOff(points, f"{_COSTS[result.objective]}, float32 = 1", f"{what}: worse (+) or better (-)", allowed)
    parts: list[Part] = [Text(told), drawn if points else Text("No trial has finite numbers.")]
    return Section("curve", "Trade-off", f"Accuracy against {result.objective}", parts, is_long=True)


def _compared(change: float | None) -> str:
    """Return a change for the worse in words: a loss and a metric have their better sides at opposite ends."""
    if change is None or not math.isfinite(change):
        return percent(change)
    return "as float32" if not change else f"{percent(abs(change)).lstrip('+')} {'worse' if change > 0 else 'better'}"


def _moved(result: TuneResult, name: str) -> str:
    """Return how many units are on the list, and how much of what all could gain there they do."""
    units = [unit for unit in result.units if unit.level == name]
    share = f" ({result.share(name):.0%} of the {units[0].gains})" if units else ""
    return f"{len(result.best.on(name))} of {count(len(units), 'unit')} on the {name} list{share}"


def _verdict(result: TuneResult) -> str:
    """Return what came of the search, in a sentence."""
    best, cost = result.best, _cost(result.best, result)
    moved = ", ".join(_moved(result, name) for name in result.levels() if best.on(name))
    changes = [f"loss {_compared(best.loss_change)}"]
    changes += [f"metric {_compared(best.metric_change)}"] if best.metric_change is not None else []
    told = f"{' and '.join(changes)}, within the tolerance."
    if cost is None and moved:
        return f"{moved}; {told} The gain in time has to be measured on a device with kernels for it."
    if cost is None or cost >= 1:
        saved = "was not faster" if result.objective == "time" else "kept no fewer bytes for backward"
        return f"Stay in float32: the best of {count(len(result.trials), 'trial')} within the tolerance {saved}."
    takes = "A step takes {:.2f} of float32's time" if result.objective == "time" else "A step keeps {:.2f} of float32's bytes for backward"
    return f"{takes.format(cost)}{', with ' * bool(moved)}{moved}; {told}"


def _trials(result: TuneResult) -> Section:
    rows, chosen = [], -1
    levels = result.levels()
    for at, trial in enumerate(result.trials):
        cost = _cost(trial, result)
        if trial.name == result.best.name:
            chosen = at
        rows.append(
            [
                op(f"{trial.name} (chosen)" if at == chosen else trial.name),
                *(whole(len(trial.on(level))) for level in levels),
                _last(trial.loss, f"{trial.loss:.5g}"),
                _last(trial.loss_change, percent(trial.loss_change)),
                number(trial.metric, NOTHING if trial.metric is None else f"{trial.metric:.5g}"),
                _last(trial.metric_change, percent(trial.metric_change)),
                _last(trial.seconds, in_seconds(trial.seconds) if math.isfinite(trial.seconds) else NOTHING),
                _last(cost, NOTHING if cost is None else f"{cost:.2f}"),
                nbytes(trial.saved_bytes),
                Cell("yes" if trial.fits else f"no: {trial.why}"),
            ]
        )
    columns = ("trial", *(f">{level}" for level in levels), ">loss", ">loss worse by", ">metric", ">metric worse by", ">step",
               ">float32 = 1", ">kept", "within the tolerance")  # fmt: skip
    table = Table(columns, rows, label="Every policy that was run", chosen=chosen, most=len(rows))
    return Section("trials", "Trials", "All trials", [table])


def _units(result: TuneResult) -> Section:
    ranked = sorted(result.units, key=lambda unit: (result.levels().index(unit.level), -unit.gain, unit.name))
    rows = [
        [
            op(unit.op),
            module("(outside every module)" if unit.module == "" else unit.module or "all"),
            Cell(unit.level),
            whole(unit.calls),
            number(unit.gain, amount(unit.gain, unit.gains)),
            number(unit.of, amount(unit.of, unit.gains)),
            error(unit.error),
            number(unit.change, percent(unit.change)),
            Cell(unit.why, "why"),
        ]
        for unit in ranked
    ]
    table = Table(
        ("op", "module", "list", ">calls", ">gain", ">of", ">error", ">change", "why"),
        rows,
        label="Every unit, with its measurements",
        filter="op, module, reason",
        choice="List",
        choices=result.levels(),
        groups=[unit.level for unit in ranked],
    )
    told = (
        "A unit is an op or, with per_module=True, an op in one module. Each was measured alone, in one step, on each list that it may "
        "move to. Gains need not add up, because neighbouring ops in different dtypes need casts. So the lists are verified as a whole."
    )
    return Section("units", "Units", "What each unit gains, and what it changes", [Text(told), table], is_long=True)


def _last(value: float | None, text: str) -> Cell:
    """Return a number that sorts after all others if it is not finite."""
    return number(value if value is not None and math.isfinite(value) else 1e300, text)
