"""The page of a search for lists: the trade-off of all trials, what each unit gains and changes, and the lists with their reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...core.casting import dtype_name
from ..formatting import NOTHING, count, size, typeset_duration
from ..pages.page import (
    Cell,
    Code,
    Heading,
    Items,
    Legend,
    Names,
    Page,
    Part,
    Point,
    Section,
    Table,
    Text,
    TradeOff,
    bar,
    colour_class,
    duration,
    error,
    made_of,
    module,
    nbytes,
    number,
    op,
    whole,
)
from .lists import ENDS, amount, by_gain, gain, list_by_unit, list_lines, percent, reason, runs_low, units_by_line
from .result import Objective, Trial, TuneResult, Unit

_COSTS = {Objective.TIME: "time of a step", Objective.MEMORY: "bytes saved for backward"}
# above this many times float32's loss or cost the axis would show nothing else
_MOST = 20.0


def tuning_page(result: TuneResult) -> Page:
    """Return what a search found."""
    low = dtype_name(result.policy.dtype)
    ranked, listed = by_gain(result), list_by_unit(result)
    steps = f", {count(result.steps, 'step')} a trial" if result.steps else ""
    smallest = "the most FLOPs in FP8" if result.best.fp8 else "the fastest" if result.objective == Objective.TIME else "the smallest"
    chosen = f"Chosen: {result.best.name}, with {smallest} of {len(result.trials):,} trials, within the tolerance."
    chosen = chosen if result.best.fp8 else chosen.replace(", with ", ", ")
    opening: list[Part] = [Text(f"{chosen} {ENDS[result.stopped].capitalize()}."), Items(_names(result))]
    if result.notes:
        opening.append(Items(result.notes, is_notes=True))
    return Page(
        title="hmp tune",
        verdict=_verdict(result, low),
        made=made_of(vars(result)),
        policies=[
            (
                f"policy {result.policy.name} {result.policy.fingerprint}",
                f"{low}; {str(result.tolerance) or 'no bound'}; seed {result.seed}{steps}, from {result.start}",
            )
        ],
        cards=_cards(result),
        opening=[*opening, Code(_use(result))],
        sections=[
            _curve(result),
            _trials(result),
            _lists(result),
            _units(ranked, listed, result, low),
        ],
    )


def _names(result: TuneResult) -> list[str]:
    """Return what was decided on each list, the most gain first, how many names are as they were, and where the lists are."""
    belongs = units_by_line(result)
    lines = []
    for cast in result.policy.lists:
        if cast == "saved":
            lines.append(f"{cast}: {', '.join(result.policy.entries(cast))}")
            continue
        decided = [(sum(gain(unit, result.objective) for unit in units), name) for (on, name), units in belongs.items() if on == cast]
        names = [name for _, name in sorted(decided, key=lambda each: (-each[0], each[1]))]
        others = len(getattr(result.policy, cast)) + sum(rule.list_name == cast for rule in result.policy.scoped) - len(names)
        lines.append(f"{cast}: {', '.join(names + ([f'{others} not decided'] if others else [])) or 'nothing'}")
    packed = [unit for unit in result.packed if unit.name in result.best.saved]
    if packed:
        nbytes, left = (sum(getattr(unit, each) for unit in packed) for each in ("nbytes", "left"))
        told = f"{count(len(packed), 'unit')}, {size(nbytes)} -> {size(left)} a step"
        lines.append(f"packed activations ({result.policy.saved_recipe}): {told}")
    return [*lines, *([f"lists: {result.folder}"] if result.folder else [])]


def _cost(trial: Trial, result: TuneResult) -> float | None:
    """Return what was made small, as a ratio to float32's; None where it was not measured."""
    base = result.trials[0]
    if result.objective == Objective.TIME and _is_emulated(trial):
        return None
    if result.objective == Objective.MEMORY:
        found = trial.saved_bytes / base.saved_bytes if base.saved_bytes else math.nan
    else:
        found = trial.ratio if trial.ratio is not None else trial.seconds / base.seconds if base.seconds else math.nan
    return found if math.isfinite(found) else None


def _is_emulated(trial: Trial) -> bool:
    """Return True if a step had products in FP8 and was not timed for that: it takes what emulating them takes."""
    return bool(trial.fp8) and trial.ratio is None


def _worse(trial: Trial, result: TuneResult) -> float | None:
    """Return how far the loss is from float32's or, where that is what was bounded, the metric below it; None where it is not finite."""
    found = trial.metric_change if result.tolerance.metric is not None else abs(trial.loss_change)
    return found if found is not None and math.isfinite(found) else None


def _curve(result: TuneResult) -> Section:
    """Return the trade-off of all trials, and the names of those that cannot be drawn."""
    points, left_out = [], []
    named = {result.trials[0].name, result.best.name} | {trial.name for trial in result.trials if trial.low is None}
    for trial in result.trials:
        cost, worse = _cost(trial, result), _worse(trial, result)
        if cost is None or worse is None or worse > _MOST or cost > _MOST:
            left_out.append(trial.name)
            continue
        points.append(Point(cost, worse, trial.fits, trial.name if trial.name in named else "", trial.name == result.best.name))
    is_metric = result.tolerance.metric is not None
    allowed = result.tolerance.metric if is_metric else result.tolerance.loss
    worse_name = "metric worse than float32's" if is_metric else "difference of the loss from float32's"
    told = (
        "Each point is a policy that the model ran under. Lower and further left is better. Dots are within the tolerance, crosses are "
        "not. The legend names the framed points, the line joins the best trade-offs, and beyond the dashed line the scale is logarithmic."
    )
    parts: list[Part] = [Text(told)]
    if points:
        parts.append(TradeOff(points, f"{_COSTS[result.objective]}, float32 = 1", worse_name, allowed))
    else:
        parts.append(Text("No trial has finite numbers."))
    if left_out:
        why = "Not drawn, because they are not finite, off the scale, or not timed (emulated FP8)"
        parts.append(Text(f"{why}: {', '.join(left_out)}.", is_soft=True))
    return Section("curve", "Trade-off", f"Accuracy against {'time' if result.objective == 'time' else 'memory'}", parts, is_long=True)


def _compared(change: float | None) -> str:
    """Return a change for the worse in words: a loss and a metric have their better sides at opposite ends."""
    if change is None or not math.isfinite(change):
        return percent(change)
    return "as float32" if not change else f"{percent(abs(change)).lstrip('+')} {'worse' if change > 0 else 'better'}"


def _verdict(result: TuneResult, low: str) -> str:
    """Return what came of the search, in a sentence."""
    best, cost = result.best, _cost(result.best, result)
    takes = {
        Objective.TIME: "A step takes {:.2f} of float32's time",
        Objective.MEMORY: "A step saves {:.2f} of float32's bytes for backward",
    }
    changes = [f"loss {_compared(best.loss_change)}"]
    changes += [f"metric {_compared(best.metric_change)}"] if best.metric_change is not None else []
    if best.fp8 and (cost is None or cost >= 1):
        moved = f"{result.share_in_fp8:.0%} of the matrix multiplication FLOPs run in FP8, in {count(len(best.fp8), 'unit')}"
        return f"{moved}; {' and '.join(changes)}, within the tolerance. The gain in time has to be measured on a device with FP8."
    if best is result.trials[0] or (best.low == () and not best.fp8) or cost is None or cost >= 1:
        saved = "was faster" if result.objective == Objective.TIME else "saved fewer bytes for backward"
        return f"Stay in float32: none of {count(len(result.trials), 'trial')} within the tolerance {saved}."
    units = "" if best.low is None else f", with {len(best.low)} of {count(len(result.units), 'unit')} in {low}"
    if best.fp8:
        units += f" and {len(best.fp8)} ({result.share_in_fp8:.0%} of the matrix multiplication FLOPs) in FP8"
    if best.saved:
        units += f"{' and' if units else ', with'} {count(len(best.saved), 'unit')} packed"
    return f"{takes[result.objective].format(cost)}{units}; {' and '.join(changes)}, within the tolerance."


def _cards(result: TuneResult) -> list[tuple[str, str, str]]:
    """Return what came of it: heading, number, and what it is of."""
    best, base = result.best, result.trials[0]
    median = "median, FP8 emulated" if _is_emulated(best) else "median"
    timed = ("time of a step", typeset_duration(best.seconds), f"{median}, float32 {typeset_duration(base.seconds)}")
    found = [
        timed if best.ratio is None else ("time of a step", f"{best.ratio:.2f}", f"of float32's {typeset_duration(base.seconds)}"),
        (
            "saved for backward",
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
        found.append(("units in the low-precision dtype", str(len(best.low)), f"of {len(result.units)} measured"))
    if best.saved:
        found.append(("units with packed activations", str(len(best.saved)), f"of {len(result.packed)}, {result.policy.saved_recipe}"))
    if best.fp8:
        found.append(
            ("matrix multiplication FLOPs in FP8", f"{result.share_in_fp8:.0%}", f"{len(best.fp8)} units, {result.policy.fp8_recipe}")
        )
    return found


def _lists(result: TuneResult) -> Section:
    """Return the lines of each list that were decided, with their reasons, and the names of the others."""
    lines = list_lines(result)
    parts: list[Part] = []
    for cast in result.policy.lists:
        decided = {name for on, name in units_by_line(result) if on == cast}
        if cast == "saved" and result.best.saved:
            decided = {name for name, _ in lines[cast]}
        parts.append(Heading(f"{cast}.txt"))
        rows = [[op(name), Cell(_typeset(str(reason)), "why")] for name, reason in lines[cast] if name in decided]
        others = [name for name, _ in lines[cast] if name not in decided]
        parts += [Table(("entry", "why"), rows)] if rows else []
        parts += [Names("not decided", others)] if others else [] if rows else [Text("Nothing.", is_soft=True)]
    return Section("lists", "Lists", "The lists", parts, is_long=True)


def _trials(result: TuneResult) -> Section:
    has_fp8 = _has_fp8(result)
    rows, chosen = [], -1
    for at, trial in enumerate(result.trials):
        cost = _cost(trial, result)
        if trial.name == result.best.name:
            chosen = at
        rows.append(
            [
                op(f"{trial.name} (chosen)" if at == chosen else trial.name),
                number(None, NOTHING) if trial.low is None else whole(len(trial.low)),
                *([number(len(trial.fp8), str(len(trial.fp8) or NOTHING))] if has_fp8 else []),
                _last(trial.loss, f"{trial.loss:.5g}"),
                _last(trial.loss_change, percent(trial.loss_change)),
                number(trial.metric, NOTHING if trial.metric is None else f"{trial.metric:.5g}"),
                _last(trial.metric_change, percent(trial.metric_change)),
                _cosine(trial.gradient_cosine),
                _last(trial.seconds, typeset_duration(trial.seconds) if math.isfinite(trial.seconds) else NOTHING),
                _last(cost, NOTHING if cost is None else f"{cost:.2f}"),
                nbytes(trial.saved_bytes),
                Cell(trial.verdict),
            ]
        )
    columns = ("trial", ">low", *([">fp8"] if has_fp8 else []), ">loss", ">loss worse by", ">metric", ">metric worse by", ">cosine",
               ">step",
               ">float32 = 1", ">saved", "within the tolerance")  # fmt: skip
    return Section(
        "trials", "Trials", "All trials", [Table(columns, rows, label="Every policy that was run", chosen=chosen, most=len(rows))]
    )


def _units(ranked: list[Unit], listed: Mapping[str, str], result: TuneResult, low: str) -> Section:
    has_fp8 = _has_fp8(result)
    rows, on = [], [listed.get(unit.name, "") for unit in ranked]
    dtypes = {"bf16": low, "fp32": "float32", "fp8": "float8_e4m3fn"}
    most = max([gain(unit, result.objective) for unit in ranked], default=0.0)
    for unit, cast in zip(ranked, on, strict=True):
        runs = runs_low(unit)
        gained = gain(unit, result.objective) if runs else 0.0
        row = [
            op(unit.op),
            module("(outside every module)" if unit.module == "" else unit.module or "all"),
            Cell(cast or NOTHING),
            whole(unit.calls),
            duration(unit.seconds_float32),
            _last(unit.seconds_low, typeset_duration(unit.seconds_low) if runs else NOTHING),
            duration(unit.cast_seconds),
            _gain(gain(unit, Objective.TIME) if runs else -math.inf, Objective.TIME),
            _gain(gain(unit, Objective.MEMORY) if runs else -math.inf, Objective.MEMORY),
            error(unit.error),
            _change(unit.sensitivity),
            bar(max(most, 0.0), (colour_class(dtypes.get(cast, "other")), gained)),
        ]
        if has_fp8:
            row += [error(unit.error_fp8), _change(unit.sensitivity_fp8) if unit.work_fp8 else number(None, NOTHING)]
        rows.append([*row, Cell(reason(cast, [unit], result).why if cast else "", "why")])
    columns = ("op", "module", "list", ">calls", ">in float32", f">in {low}", ">casts", ">gain", ">bytes less", ">error", ">loss", "",
               *([">fp8 error", ">fp8 loss"] if has_fp8 else []), "why")  # fmt: skip
    table = Table(
        columns,
        rows,
        label="Every unit, with its measurements",
        filter="op, module, reason",
        choice="List",
        choices=[*(["fp8"] if has_fp8 else []), "bf16", "fp32", "promote"],
        groups=on,
    )
    colours = [(low, f"chosen for {low}"), ("float32", "kept in float32"), ("other", "on neither list")]
    if has_fp8:
        colours.insert(1, ("float8_e4m3fn", "chosen for FP8"))
    told = (
        "A unit is an op or, with per_module=True, an op in one module. Each was measured alone, in one step; the bar is its gain. Gains "
        "need not add up, because neighbouring ops in different dtypes need casts. So the lists are verified as a whole."
    )
    return Section("units", "Units", "What each unit gains, and what it changes", [Legend(colours), Text(told), table], is_long=True)


def _has_fp8(result: TuneResult) -> bool:
    return any(unit.work_fp8 for unit in result.units)


def _gain(value: float, objective: Objective) -> Cell:
    return number(value if math.isfinite(value) else -1e300, amount(value, objective).replace("us", "µs"))


def _change(value: float) -> Cell:
    return number(value, percent(value))


def _last(value: float | None, text: str) -> Cell:
    """Return a number that sorts after all others if it is not finite."""
    return number(value if value is not None and math.isfinite(value) else 1e300, text)


def _cosine(value: float | None) -> Cell:
    return number(value if value is not None and math.isfinite(value) else -2, NOTHING if value is None else f"{value:.4f}")


def _typeset(text: str) -> str:
    return text.replace(" us ", " µs ")


def _use(result: TuneResult) -> str:
    folder = result.folder or "tuned"
    if result.policy.scoped:
        return f'hmp.apply(model, "{folder}")'
    return f'hmp.convert(policy="{folder}")  # or hmp run --policy {folder} script.py'
