"""What a search keeps to, measures and finds: tolerance, units, trials, and the result with its lists, which have reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.lists import kind_of, names
from ...core.policy import folders
from ...core.policy.entries import EVERY_OP, ListName
from ...core.policy.policy import Policy
from ...errors import HmpError
from ..formatting import NOTHING, duration, json_text, json_values, size, versioned
from ..pages.page import Page, Result
from ..pages.page import amount as counted
from .decisions import LOW, WIDE, Key, scope_of

_KEYS = "'loss' and 'metric' (relative, 0.01 is one per cent)"


@dataclass(frozen=True)
class Tolerance:
    """The bounds a policy must keep, None for none.

    `loss` is the most by which it may differ from float32's, relative to it, and `metric` the most by which it may be worse.

    A loss that is far below float32's isn't better: it underflowed, or the model learns something else.
    """

    loss: float | None = None
    metric: float | None = None

    def exceeded(self, loss_change: float, metric_change: float | None) -> str:
        """Return what is beyond the bounds, "" for nothing. A number that is not finite is beyond every bound."""
        found = []
        if not math.isfinite(loss_change):
            found.append("the loss is not finite")
        elif self.loss is not None and abs(loss_change) > self.loss:
            found.append(f"loss {loss_change:+.2%}, {self.loss:.2%} allowed")
        if self.metric is not None and metric_change is not None and not metric_change <= self.metric:
            found.append(f"metric worse by {metric_change:.2%}, {self.metric:.2%} allowed")
        return "; ".join(found)

    def __str__(self) -> str:
        parts = [
            None if self.loss is None else f"loss within {self.loss:.2%} of float32's",
            None if self.metric is None else f"metric at most {self.metric:.2%} worse",
        ]
        return ", ".join(filter(None, parts))


def as_tolerance(value: float | Mapping[str, float], has_metric: bool) -> Tolerance:
    """Return the user's bounds: a number is for the metric if there is one, else for the loss. Raise HmpError for any other value."""
    if isinstance(value, Mapping):
        unknown = sorted(set(map(str, value)) - {"loss", "metric"})
        if unknown or not value:
            raise HmpError(f"tolerance= expected {_KEYS}, got {', '.join(map(repr, unknown)) or 'an empty mapping'}")
        found = Tolerance(**{name: _number(name, each) for name, each in value.items()})
    else:
        found = Tolerance(**{"metric" if has_metric else "loss": _number("tolerance", value)})
    if found.metric is not None and not has_metric:
        raise HmpError("tolerance= has a bound for the metric, but metric= is missing; pass metric=, a function of the model")
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise HmpError(f"invalid {name}={value!r}: expected a number >= 0, or a mapping with {_KEYS}")
    return float(value)


@dataclass(frozen=True)
class Unit:
    """What is decided at once, an op or an op in one module, and what was measured of it alone in one step, on one list.

    `module` is None where the op is decided for all modules together, "" for calls outside every module. On the list `level` it gains
    `gain` of `of`, of what `gains` says: "seconds", "bytes", or something that is counted. `error` is the relative error of its results
    against float32's, or of what it saves for backward, and `change` what the list's units are ordered by: the relative change of the loss
    that the error makes, to first order, or the error itself where no gradient came back. Both are infinite where the op cannot run so,
    or gives NaN or Inf. `why` says what came of it.
    """

    op: str
    module: str | None
    level: str
    calls: int
    gain: float
    of: float
    gains: str
    error: float
    change: float
    why: str = ""

    @property
    def name(self) -> str:
        """As a list spells it."""
        return str(Key(self.op, self.module))


@dataclass(frozen=True)
class Trial:
    """One policy that the model was really trained or evaluated under.

    `lists` has the units on each list, without those on the FP32 list; `taken` is the policy whose lists it has as they are, "" for none.
    `loss_change` and `metric_change` are relative to float32's, positive for a larger loss and for a worse metric.
    `seconds` is the median time of a step, `ratio` that to float32's in the same rounds where both were timed; `saved_bytes` what
    a step saves for backward. `fits` is whether all of it is within the tolerance; `why` says what is not.
    """

    name: str
    policy: Policy
    lists: Mapping[str, tuple[str, ...]]
    loss: float
    loss_change: float
    metric: float | None
    metric_change: float | None
    seconds: float
    saved_bytes: int
    fits: bool
    why: str = ""
    ratio: float | None = None
    taken: str = ""

    def on(self, name: str) -> tuple[str, ...]:
        """Return the units on that list."""
        return self.lists.get(name, ())


@dataclass(frozen=True, repr=False)
class TuneResult(Result):
    """The policy that was chosen, and everything that was measured on the way; `print(...)` shows it as a table.

    `policy` belongs to `best`, the cheapest trial within the tolerance. `trials` are in the order in which they ran, float32 first.
    `objective` is "time" or "memory". `stopped` says why the search ended: "solved", "budget", or "interrupted" in what Ctrl-C left.
    `model` is the model's class, `date` when it ended, `hmp` and `torch` are versions.

    Example:
        >>> net, data = torch.nn.Linear(4, 1), [torch.randn(8, 4)]
        >>> result = hmp.tune(net, data, loss=lambda model, x: model(x).square().mean(), objective="memory", max_trials=8)
        >>> folder, values = result.save("tuned"), result.to_dict()
        >>> json, page = result.to_json("tune.json"), result.to_html("tune.html")
        >>> result.levels(), 0 <= result.share("bf16") <= 1
        (['bf16'], True)
    """

    policy: Policy
    best: Trial
    trials: tuple[Trial, ...]
    units: tuple[Unit, ...]
    tolerance: Tolerance
    objective: str
    stopped: str
    start: str
    seed: int
    steps: int
    device: str
    torch: str
    folder: str | None = None
    model: str = ""
    date: str = ""
    hmp: str = ""

    def __getitem__(self, name: str) -> Trial:
        return self._named(self.trials, name, "the name of a trial")

    def levels(self) -> list[str]:
        """Return the lists that units were measured for.

        Returns:
            Their names, in the order of the search.
        """
        return list(dict.fromkeys(unit.level for unit in self.units))

    def share(self, level: str) -> float:
        """Return how much of what the units could gain on a list, such as the FLOPs of matrix multiplications, they do under `policy`.

        Args:
            level: The list.

        Returns:
            A share of 1.
        """
        units = [unit for unit in self.units if unit.level == level]
        of = sum(unit.of for unit in units)
        return sum(unit.gain for unit in units if unit.name in self.best.on(level)) / of if of else 0.0

    def _page(self) -> Page:
        from .page import tuning_page  # here: it imports this module

        return tuning_page(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values.

        Returns:
            The values that `to_json()` writes.
        """
        trials = [{**vars(trial), "policy": trial.policy.to_dict()} for trial in self.trials]
        nested = {"policy": self.policy.to_dict(), "best": self.best.name, "tolerance": asdict(self.tolerance), "trials": trials}
        plain: dict[str, Any] = json_values(versioned({**vars(self), **nested, "units": [asdict(unit) for unit in self.units]}))
        return plain

    def save(self, folder: str | Path) -> Path:
        """Write the lists, each name with a comment that says why, and tune.json into a folder, which is made.

        Args:
            folder: The folder.

        Returns:
            The folder.

        Raises:
            HmpError: It cannot be written.
        """
        return write(self, Path(folder))


# --- the folder: list files in which each name has its reason on its line, and tune.json

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
    """Return why an entry is on its list: what its units gain together, the largest change of one, and what came of them."""
    taken = Path(result.best.taken or result.start).name  # of a folder its last part: lists hold no paths of a machine
    if name == EVERY_OP and not kind_of(cast).adds:
        return "every op on no other list"
    if not units:
        return f"not decided; as in {taken}"
    why = f"as in {taken}" if result.best.taken else "; ".join(dict.fromkeys(unit.why for unit in units))
    if not all(math.isfinite(unit.change) for unit in units):
        return why
    gain, of, gains = sum(unit.gain for unit in units), sum(unit.of for unit in units), units[0].gains
    return f"{amount(gain, gains)} of {amount(of, gains)} | {percent(max(unit.change for unit in units))} | {why}"


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

    HmpError where that cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folders.write(folder, list_files(result))
        (folder / JSON_FILE).write_text(json_text(result.to_dict()), encoding="utf-8")
    except OSError as error:
        raise HmpError(f"{folder}: can't write the lists ({error.strerror or error}); give a folder that can be written to") from error
    return folder


def list_files(result: TuneResult) -> dict[str, str]:
    """Return the text of each list file of the policy that was chosen, by the file's name."""
    files = {kind_of(cast).file: _heading(result, cast) + _aligned(lines) for cast, lines in list_lines(result).items()}
    return files | folders.word_files(result.policy.to_dict())


def _heading(result: TuneResult, cast: ListName) -> str:
    """Return what holds for the whole list, as comments."""
    kind, best, base = kind_of(cast), result.best, result.trials[0]
    found = [f"loss {percent(best.loss_change)}"]
    if best.metric_change is not None:
        found.append(f"metric {percent(-best.metric_change)}")
    if best.ratio is not None:
        found.append(f"{best.ratio:.2f} of the time")
    if base.saved_bytes:
        found.append(f"{best.saved_bytes / base.saved_bytes:.2f} of the bytes kept for backward")
    words = [kind.contents, *(str(getattr(result.policy, word.field)) for word in kind.words)]
    changes = "the loss" if kind.level is None else kind.level.changes
    heading = (
        f"The {kind.title} list ({', '.join(words)}); written by hmp tune, which minimised {result.objective}.",
        f"Tolerance: {str(result.tolerance) or 'none'}.",
        f"Verified ({result.device}, torch {result.torch}, seed {result.seed}): {', '.join(found)}, against float32.",
        f"After each name: gain per step{' in low precision' if cast == WIDE else ''}, of how much | change of {changes} | why.",
    )
    return "".join(f"# {' '.join(line.split())}\n" for line in heading) + "\n"


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in lines if len(name) <= _WIDEST), default=0)
    return "".join(f"{name:<{width}}  # {' '.join(reason.split())}\n" for name, reason in lines)
