"""The folder of a search: list files in which each name has its reason on its line, and tune.json."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.lists import kind_of, names
from ...core.policy.entries import EVERY_OP, ListName
from ...core.policy.folders import optional_files, word_files
from ...errors import HmpError
from ..formatting import NOTHING, count, duration, json_text, size
from ..pages.page import amount as counted
from .decisions import LOW, WIDE, scope_of
from .result import TuneResult, Unit

# How a search ended.
ENDS = {"solved": "finished", "budget": "the budget is spent (seconds=, max_trials=)", "interrupted": "interrupted"}


def amount(value: float, gains: str) -> str:
    """Return a gain with its unit, and with the sign of less than nothing; what is neither seconds nor bytes is counted."""
    if not math.isfinite(value):
        return NOTHING
    text = {"seconds": duration, "bytes": size}.get(gains, lambda number: counted(round(number)))(abs(value))
    return "0" if text == NOTHING else f"-{text}" if value < 0 else text


def percent(change: float | None) -> str:
    """Return a relative change with its sign."""
    if change is None:
        return NOTHING
    if not math.isfinite(change):
        return "not finite"
    return "under 0.01%" if 0 < abs(change) < 5e-5 else f"{change + 0.0:+.2%}"


def reason(units: Sequence[Unit]) -> str:
    """Return what came of these units of one list: what they gain together, the largest change of one, and why."""
    why = "; ".join(dict.fromkeys(unit.why for unit in units))
    if not all(math.isfinite(unit.change) for unit in units):
        return why
    gain, of, gains = sum(unit.gain for unit in units), sum(unit.of for unit in units), units[0].gains
    return f"{amount(gain, gains)} of {amount(of, gains)} | {percent(max(unit.change for unit in units))} | {why}"


def list_lines(result: TuneResult) -> dict[ListName, list[tuple[str, str]]]:
    """Return by list each entry as it is spelled with its reason, what was decided first and what gains most before all."""
    found: dict[ListName, list[tuple[str, str]]] = {}
    for cast in result.policy.lists:
        units = units_by_entry(result, cast)
        entries = sorted(units, key=lambda entry: (entry != EVERY_OP, not units[entry], -sum(unit.gain for unit in units[entry]), entry))
        found[cast] = [(entry, _reason(cast, entry, units[entry], result)) for entry in entries]
    return found


def units_by_entry(result: TuneResult, cast: ListName) -> dict[str, list[Unit]]:
    """Return the units that are on the list by each of its entries, an op in all modules or in the one that the entry names.

    Of the FP32 list, what was measured of them in the low-precision dtype.
    """
    found: dict[str, list[Unit]] = {}
    ops_of: dict[str, set[str]] = {}
    for op, entry in result.policy.casts_by_op(cast).items():
        ops_of.setdefault(entry.name, set()).add(op)
    elsewhere = {name for each, names in result.best.lists.items() if not kind_of(each).adds for name in names}
    units = [unit for unit in result.units if unit.level == (LOW if cast == WIDE else cast)]
    units = [unit for unit in units if (unit.name not in elsewhere if cast == WIDE else unit.name in result.best.on(cast))]
    for name in getattr(result.policy, cast):
        found[name] = [unit for unit in units if unit.op in {name, *ops_of.get(name, ())}]
    for entry in result.policy.scoped:
        if entry.list_name == cast:
            found[entry.text] = [unit for unit in units if unit.op == entry.name and unit.module and scope_of(unit.module) == entry.scope]
    return found


def _reason(cast: ListName, name: str, units: Sequence[Unit], result: TuneResult) -> str:
    taken = Path(result.best.taken or result.start).name  # of a folder its last part: lists hold no paths of a machine
    if name == EVERY_OP and not kind_of(cast).adds:
        return "every op on no other list"
    if not units:
        return f"not decided; as in {taken}"
    return reason([replace(unit, why=f"as in {taken}") for unit in units] if result.best.taken else units)


JSON_FILE = "tune.json"
_WIDEST = 40  # names beyond it do not push all other comments to the right


def check_folder(folder: str | Path | None) -> Path | None:
    """Return the folder to write into. Raise HmpError where it has lists that write() would replace and has not written."""
    found = None if folder is None else Path(folder)
    if found is not None and not (found / JSON_FILE).exists() and any((found / f"{name}.txt").exists() for name in names()):
        raise HmpError(f"{found}: has lists that tune() did not write and would replace; give another folder")
    return found


def write(result: TuneResult, folder: Path) -> Path:
    """Return `folder` with the lists of `result`, so that Policy.load(folder) is its policy, and tune.json.

    What was there is replaced whole.

    HmpError where that cannot be written.
    """
    texts = list_files(result) | {JSON_FILE: json_text(result.to_dict())}
    staged = {folder / f".{name}.part": folder / name for name in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for part, target in staged.items():
                part.write_text(texts[target.name], encoding="utf-8")
            _put(staged, [folder / name for name in optional_files() if name not in texts])
        finally:
            for part in staged:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise HmpError(f"{folder}: can't write the lists ({error.strerror or error}); give a folder that can be written to") from error
    return folder


def _put(staged: Mapping[Path, Path], stale: Collection[Path]) -> None:
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
    files = {kind_of(cast).file: _heading(result, cast) + _aligned(lines) for cast, lines in list_lines(result).items()}
    return files | word_files(result.policy.to_dict())


def _heading(result: TuneResult, cast: ListName) -> str:
    """Return what holds for the whole list, as comments."""
    kind, best = kind_of(cast), result.best
    words = [str(getattr(result.policy, word.field)) for word in kind.words]
    found = [f"loss {percent(best.loss_change)}"]
    if best.metric_change is not None:
        found.append(f"metric {percent(-best.metric_change)}")
    if best.ratio is not None:
        found.append(f"{best.ratio:.2f} of the time")
    base = result.trials[0].saved_bytes if result.trials else 0
    if base:
        found.append(f"{best.saved_bytes / base:.2f} of the bytes saved for backward")
    if kind.level is not None and result.best.on(cast):
        found.append(f"{result.share(cast):.0%} of the {kind.level.gains} moved to this list")
    steps = f", {count(result.steps, 'step')}" if result.steps else ""
    changes = "the loss" if kind.level is None else kind.level.changes
    heading = (
        f"The {kind.title} list ({', '.join([kind.contents, *words])}); written by hmp tune, which minimised {result.objective}.",
        f"Tolerance: {str(result.tolerance) or 'none'}.",
        f"Verified ({result.device}, torch {result.torch}, seed {result.seed}{steps}): {', '.join(found)}, against float32.",
        f"After each name: gain per step{' in low precision' if cast == WIDE else ''}, of how much | change of {changes} | why.",
    )
    return "".join(f"# {' '.join(line.split())}\n" for line in heading) + "\n"


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in lines if len(name) <= _WIDEST), default=0)
    return "".join(f"{name:<{width}}  # {' '.join(reason.split())}\n" for name, reason in lines)
