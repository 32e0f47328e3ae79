"""The folder of a search: list files in which each name has its reason on its line, and tune.json."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ...core.casting import dtype_name
from ...core.policy import EVERY_OP, ListEntry, ListName, exactness, optional_files, word_files
from ...errors import HmpError
from ..formatting import NOTHING, count, duration, size
from .result import LEAST_GAIN, Objective, Stopped, TuneResult, Unit, least_gain

# How a search ended.
ENDS = {
    Stopped.SOLVED: "finished: no further change of one unit is cheaper and within the tolerance",
    Stopped.BUDGET: "the budget is spent (seconds=, max_trials=); a larger one continues from here",
    Stopped.INTERRUPTED: "interrupted; the same call continues from here",
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
        return Reason(f"{moved:.0%} of the matrix multiplication FLOPs", percent(sum(unit.sensitivity_fp8 for unit in units)), "chosen")
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
        return "exceeded the tolerance in a trial"
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
    """Return what packing the saved activations of the ops of this entry brings, and what it changes."""
    if not result.best.saved:
        return Reason(why=f"as in {Path(result.start).name}")
    units = [unit for unit in result.packed if name in (unit.op, unit.name) and unit.name in result.best.saved]
    nbytes, left = (sum(getattr(unit, each) for unit in units) for each in ("nbytes", "left"))
    if not nbytes:
        return Reason(why="saves only tensors that other ops save too")
    return Reason(f"{size(nbytes)} -> {size(left)}", f"{max(unit.error for unit in units):.1e}", "chosen")


JSON_FILE = "tune.json"
_WIDEST = 40  # names beyond it do not push all other comments to the right


def write(result: TuneResult, folder: Path) -> Path:
    """Return `folder` with the lists of `result`, so that Policy.load(folder) is its policy, and tune.json.

    What was there is replaced whole.

    HmpError where that cannot be written.
    """
    lists = list_files(result)
    staged = {folder / f".{name}.part": folder / name for name in (*lists, JSON_FILE)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for part, target in staged.items():
                if target.name == JSON_FILE:
                    result.to_json(part)
                else:
                    part.write_text(lists[target.name], encoding="utf-8")
            _put(staged, [folder / name for name in optional_files() if name not in lists])
        finally:
            for part in staged:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise HmpError(f"{folder}: can't write the lists ({error.strerror or error}); give a folder that can be written to") from error
    return folder


def _put(staged: Mapping[Path, Path], stale: Sequence[Path]) -> None:
    """Move all files to their places; Ctrl-C between two of them waits for the rest, for lists of two searches may exclude each other."""
    try:
        for part, target in staged.items():
            os.replace(part, target)
    finally:
        for part, target in staged.items():
            with contextlib.suppress(FileNotFoundError):
                os.replace(part, target)
        for file in stale:
            file.unlink(missing_ok=True)


def list_files(result: TuneResult) -> dict[str, str]:
    """Return the text of each list file of the policy that was chosen, by the file's name."""
    lines = list_lines(result)
    files = {f"{cast}.txt": _heading(result, cast) + _aligned(lines[cast]) for cast in result.policy.lists}
    return files | word_files(result.policy.to_dict())


def _heading(result: TuneResult, cast: ListName) -> str:
    """Return what holds for the whole list, as comments."""
    low = dtype_name(result.policy.dtype)
    said = {"bf16": f"in {low}", "fp32": "in float32", "promote": "in the widest dtype of their inputs"}
    said["fp8"] = f"in FP8 ({result.policy.fp8_recipe}), or in {low} where FP8 is impossible"
    ops = f"Ops that run {said[cast]}" if cast in said else f"Ops whose saved activations are packed ({result.policy.saved_recipe})"
    best, objective = result.best, {Objective.TIME: "the time of a step", Objective.MEMORY: "activation memory"}[result.objective]
    found = [f"loss {percent(best.loss_change)}"]
    if best.metric_change is not None:
        found.append(f"metric {percent(-best.metric_change)}")
    if best.ratio is not None:
        found.append(f"{best.ratio:.2f} of the time")
    base = result.trials[0].saved_bytes if result.trials else 0
    if base:
        found.append(f"{best.saved_bytes / base:.2f} of the bytes saved for backward")
    steps = f", {count(result.steps, 'step')}" if result.steps else ""
    moved = ", then moved matrix multiplications to FP8" if best.fp8 else ""
    if cast == "fp8":
        found.append(f"{result.share_in_fp8:.0%} of the matrix multiplication FLOPs in FP8")
    heading = (
        f"{ops}; written by hmp tune, which minimised {objective}{moved}.",
        f"Tolerance: {str(result.tolerance) or 'none'}.",
        f"Verified ({result.device}, torch {result.torch}, seed {result.seed}{steps}): {', '.join(found)}, against float32.",
        f"After each name: {_columns(result, cast)}.",
    )
    return "".join(f"# {' '.join(line.split())}\n" for line in heading) + "\n"


def _columns(result: TuneResult, cast: ListName) -> str:
    """Return what the columns of the comments are."""
    if cast == "saved":
        return "bytes of a step, before and after packing | relative error | reason"
    gained = "bytes saved" if result.objective == Objective.MEMORY else "time saved"
    return f"{'share in FP8' if cast == 'fp8' else f'{gained} per step by the low-precision dtype'} | change of the loss | reason"


def _aligned(lines: Sequence[tuple[str, Reason]]) -> str:
    width = max((len(name) for name, _ in lines if len(name) <= _WIDEST), default=0)
    return "".join(f"{name:<{width}}  # {' '.join(str(reason).split())}\n" for name, reason in lines)


def list_lines(result: TuneResult) -> dict[ListName, list[tuple[str, Reason]]]:
    """Return by list each name as it is spelled with its reason, what was decided first and what gains most before all."""
    belongs = units_by_line(result)
    found: dict[ListName, list[tuple[str, Reason]]] = {}
    for cast in _of_casts(result):
        names = sorted(getattr(result.policy, cast), key=lambda name: _place(name, belongs.get((cast, name), []), result))
        names += [rule.text for rule in result.policy.scoped if rule.list_name == cast]
        found[cast] = [(name, _reason(cast, name, belongs.get((cast, name), []), result)) for name in names]
    if "saved" in result.policy.lists:
        found["saved"] = [(name, reason_packed(name, result)) for name in result.policy.entries("saved")]
    return found


def _of_casts(result: TuneResult) -> list[ListName]:
    """Return the lists that say what ops run in."""
    return [cast for cast in result.policy.lists if cast != "saved"]


def _place(name: str, units: Sequence[Unit], result: TuneResult) -> tuple[bool, bool, float, str]:
    return name != EVERY_OP, not units, -sum(gain(unit, result.objective) for unit in units), name


def units_by_line(result: TuneResult) -> dict[tuple[ListName, str], list[Unit]]:
    """Return the units that each entry decides, by list and line: that for the nearest module around a unit, else the op's."""
    ops: dict[str, tuple[ListName, str]] = {}
    for cast in _of_casts(result):
        names = {op: rule.name for op, rule in result.policy.casts_by_op(cast).items()}
        names |= {name: name for name in getattr(result.policy, cast)}
        for op, name in names.items():
            ops.setdefault(op, (cast, name))  # the first list that holds an op wins (R4)
    found: dict[tuple[ListName, str], list[Unit]] = {}
    for unit in result.units:
        rule = _scoped(unit, [rule for rule in result.policy.scoped if rule.list_name != "saved"])
        place = ops.get(unit.op) if rule is None else (rule.list_name, rule.text)
        if place is not None:
            found.setdefault(place, []).append(unit)
    return found


def list_by_unit(result: TuneResult) -> dict[str, ListName]:
    """Return the list that decides each unit, by the unit's name; units of no list are left out."""
    return {unit.name: cast for (cast, _), units in units_by_line(result).items() for unit in units}


def _scoped(unit: Unit, rules: Sequence[ListEntry]) -> ListEntry | None:
    """Return the scoped rule that decides the unit: of the nearest module, and there of the most exact glob; None for none."""
    parts = (unit.module or "").split(".")
    for path in (".".join(parts[:end]) for end in range(len(parts), 0, -1)):
        matching = [rule for rule in rules if rule.name == unit.op and fnmatchcase(path, rule.scope or "")]
        if matching:
            return max(matching, key=lambda rule: exactness(str(rule.scope)))
    return None


def _reason(cast: ListName, name: str, units: Sequence[Unit], result: TuneResult) -> Reason:
    if name == EVERY_OP:
        return Reason(why="every op on no other list")
    if result.best.low is None:
        return reason("bf16", units, result)._replace(why=f"as in {result.best.name}")
    taken = Path(result.start).name  # of a folder its last part: lists hold no paths of a machine
    if not units:
        return Reason(why=f"not decided; as in {taken}")
    return reason(cast, units, result) if cast in ("fp8", "bf16", "fp32") else Reason(why=f"as in {taken}")
