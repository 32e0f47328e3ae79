"""What a search found as lines of text."""

from __future__ import annotations

from ...core.formatting import NOTHING, aligned, count, duration, size
from .files import units_by_line
from .reasons import ENDS, gain, percent
from .result import Trial, TuneResult

_TRIALS = ("trial", "low", "loss", "change", "metric", "worse", "cosine", "step", "vs float32", "saved", "within tolerance")


def table(result: TuneResult) -> str:
    """Return the lists that were chosen, what gains most first, the trials, and how the search ended."""
    named = {"time": "the fastest", "memory": "the smallest"}[result.objective]
    steps = f"{count(result.steps, 'step')} a trial" if result.steps else "nothing is trained"
    moved = ", and as much in FP8 as fits," if result.best.fp8 else ""
    lines = [
        f"hmp tune: {named} lists{moved} with {str(result.tolerance) or 'no bound'}",
        f"{result.device}, torch {result.torch}, seed {result.seed}, {steps}, from {result.start}",
        "",
        *_lists(result),
        "",
        *_trials(result),
    ]
    return "\n".join([*lines, "", *_ended(result), *result.notes])


def _lists(result: TuneResult) -> list[str]:
    """Return what was decided on each list, the most gain first, and how many names are as they were."""
    belongs = units_by_line(result)
    lines = []
    for cast in result.policy.lists:
        if cast == "saved":
            lines.append(f"{cast:7}  {', '.join(result.policy.entries(cast))}")
            continue
        decided = [(sum(gain(unit, result.objective) for unit in units), name) for (on, name), units in belongs.items() if on == cast]
        names = [name for _, name in sorted(decided, key=lambda each: (-each[0], each[1]))]
        others = len(getattr(result.policy, cast)) + sum(rule.cast == cast for rule in result.policy.scoped) - len(names)
        rest = [f"{others} not decided"] if others else []
        lines.append(f"{cast:7}  {', '.join(names + rest) or 'nothing'}")
    return lines


def _trials(result: TuneResult) -> list[str]:
    """Return all trials, as a table."""
    rows = [_TRIALS, *(_trial(trial, result) for trial in result.trials)]
    if any(trial.fp8 for trial in result.trials):
        eight = ["fp8", *(str(len(trial.fp8)) if trial.fp8 else NOTHING for trial in result.trials)]
        rows = [(*row[:2], cell, *row[2:]) for row, cell in zip(rows, eight, strict=True)]
    if any(trial.saved for trial in result.trials):
        packed = ["packed", *(str(len(trial.saved)) if trial.saved else NOTHING for trial in result.trials)]
        rows = [(*row[:-2], cell, *row[-2:]) for row, cell in zip(rows, packed, strict=True)]
    return aligned(rows, {0, len(rows[0]) - 1}, ruled=True)


def _trial(trial: Trial, result: TuneResult) -> tuple[str, ...]:
    return (
        trial.name,
        NOTHING if trial.low is None else str(len(trial.low)),
        f"{trial.loss:.5g}",
        percent(trial.loss_change),
        NOTHING if trial.metric is None else f"{trial.metric:.5g}",
        percent(trial.metric_change),
        NOTHING if trial.gradient_cosine is None else f"{trial.gradient_cosine:.4f}",
        duration(trial.seconds),
        NOTHING if trial.ratio is None else f"{trial.ratio:.2f}",
        size(trial.saved_bytes),
        f"{trial.verdict}, chosen" if trial.name == result.best.name else trial.verdict,
    )


def _ended(result: TuneResult) -> list[str]:
    best = result.best
    lines = [f"chosen: {best.name}: loss {percent(best.loss_change)}, {_against_float32(result)}; {ENDS[result.stopped]}"]
    if best.fp8:
        lines.append(f"in FP8 ({result.policy.fp8_recipe}): {result.share_in_fp8:.0%} of the products' work")
    if best.saved:
        lines.append(f"packed for backward ({result.policy.saved_recipe}): {_packed(result)}")
    return [*lines, *([f"lists: {result.folder}"] if result.folder else [])]


def _packed(result: TuneResult) -> str:
    """Return what packing brings, as it was measured with all that can be packed."""
    units = [unit for unit in result.packed if unit.name in result.best.saved]
    nbytes, left = (sum(getattr(unit, each) for unit in units) for each in ("nbytes", "left"))
    return f"{count(len(units), 'unit')}, {size(nbytes)} -> {size(left)} a step"


def _against_float32(result: TuneResult) -> str:
    """Return what was made small, against float32, with a word if that isn't a gain."""
    best, base = result.best, result.trials[0]
    if result.objective == "time":
        ratio, what = best.ratio, "time"
    else:
        ratio, what = best.saved_bytes / base.saved_bytes if base.saved_bytes else None, "bytes"
    if ratio is None:
        return f"{what} not measured"
    return f"{ratio:.2f} of float32's {what}" + ("" if ratio < 1 else ", which is no gain here")
