"""What a search found: units, trials, and the policy that was chosen among those that were verified."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..lists import Policy
from .decisions import Key
from .tolerance import Tolerance

_NESTED = ("policy", "best", "trials", "units", "flows")
Objective = Literal["time", "memory"]
Stopped = Literal["solved", "budget", "interrupted"]


@dataclass(frozen=True)
class Unit:
    """What is decided at once: an op, or an op in one module, and what was measured of it in one step in float32.

    `module` is None where the op is decided for all modules together, "" for calls outside every module. `error` is the relative error
    ||low - float32|| / ||float32|| of the op alone on the same inputs, over all its calls; `sensitivity` the relative change of the loss
    that this error makes, to first order. Seconds are forward and backward of all calls of a step without casts; `cast_seconds` those of
    the casts of parameters and batches that the low dtype needs. `saved_bytes` is how many bytes fewer it keeps for backward in the low
    dtype. Infinite where the op cannot run in the low dtype, or gives NaN or Inf there.
    """

    op: str
    module: str | None
    calls: int
    error: float
    sensitivity: float
    seconds_float32: float
    seconds_low: float
    cast_seconds: float
    saved_bytes: int

    @property
    def name(self) -> str:
        """As a list spells it."""
        return str(Key(self.op, self.module))


@dataclass(frozen=True)
class Flow:
    """Tensors that go from one unit to another in a step: seconds and bytes of casting them, where one is in the low dtype alone."""

    source: str
    target: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Trial:
    """One policy that the model was really trained or evaluated under.

    `low` holds the units that ran in the low dtype, None for a policy that was taken as it is. `loss_change` and `metric_change` are
    relative to float32's, positive for a larger loss and for a worse metric; `gradient_cosine` is that of all parameters' gradients as
    one vector against float32's.
    `seconds` is the median time of a step, `ratio` that to float32's in the same rounds where it was timed beside it; `saved_bytes` what
    a step keeps for backward. `fits` is whether all of it is within the tolerance; `why` says what is not;
    `led` whether it was the best when it was made. `left` holds the decided ops that stayed on neither list, as the start has them.
    """

    name: str
    policy: Policy
    low: tuple[str, ...] | None
    loss: float
    loss_change: float
    metric: float | None
    metric_change: float | None
    gradient_cosine: float | None
    seconds: float
    saved_bytes: int
    fits: bool
    why: str = ""
    ratio: float | None = None
    led: bool = False
    left: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether it is within the tolerance, and why not."""
        return "yes" if self.fits else f"no: {self.why}" if self.why else "no"


@dataclass(frozen=True, repr=False)
class TuneResult:
    """The policy that was chosen, and everything that was measured on the way; `print(...)` shows it as a table.

    `policy` belongs to `best`, the cheapest trial within the tolerance. `trials` are in the order in which they ran, float32 first.
    `predicted` is the cost of a step that the solver expects of the best lists if there were no tolerance, in seconds or bytes against
    float32, and `left` how much of it the chosen lists leave behind. `stopped` says why the search ended. `key` tells searches apart
    that may not go on from each other's tune.json.
    """

    policy: Policy
    best: Trial
    trials: tuple[Trial, ...]
    units: tuple[Unit, ...]
    flows: tuple[Flow, ...]
    tolerance: Tolerance
    objective: Objective
    stopped: Stopped
    start: str
    seed: int
    steps: int
    predicted: float
    left: float
    device: str
    torch: str
    notes: tuple[str, ...] = ()
    folder: str | None = None
    key: str = ""

    def __getitem__(self, name: str) -> Trial:
        for trial in self.trials:
            if trial.name == name:
                return trial
        raise KeyError(f"no trial {name!r}; there are {', '.join(trial.name for trial in self.trials)}")

    def __str__(self) -> str:
        from .table import table

        return table(self)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values; numbers that are not finite are the strings "nan", "inf" and "-inf"."""
        from ..formatting import json_values

        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NESTED}
        values["policy"] = self.policy.to_dict()
        values["best"] = self.best.name
        values["tolerance"] = asdict(self.tolerance)
        values["units"] = [asdict(unit) for unit in self.units]
        values["flows"] = [asdict(flow) for flow in self.flows]
        values["trials"] = [trial_values(trial) for trial in self.trials]
        plain: dict[str, Any] = json_values(values)
        return plain

    def to_json(self, path: str | Path) -> Path:
        """Writes `to_dict()` into the file `path`, which is returned."""
        target = Path(path)
        target.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return target

    def to_html(self, path: str | Path) -> Path:
        """Writes a page with the accuracy-speed curve of all trials into the file `path`, which is returned. Needs `hmp-torch[report]`."""
        from .page import tuning_page

        target = Path(path)
        target.write_text(tuning_page(self.to_dict()), encoding="utf-8")
        return target

    def save(self, folder: str | Path) -> Path:
        """Writes the lists, each name with a comment that says why, and tune.json into `folder`, which is made and returned."""
        from .files import write

        return write(self, Path(folder))


def trial_values(trial: Trial) -> dict[str, Any]:
    """The trial as plain values."""
    values = {name: getattr(trial, name) for name in trial.__dataclass_fields__}
    return {**values, "policy": trial.policy.to_dict(), "low": None if trial.low is None else list(trial.low), "left": list(trial.left)}


def trial_of(values: Mapping[str, Any]) -> Trial:
    """The trial that `trial_values()` described."""
    numbers = _numbers(values, ("loss", "loss_change", "metric", "metric_change", "gradient_cosine", "seconds", "ratio"))
    low = None if values["low"] is None else tuple(values["low"])
    return Trial(**{**values, **numbers, "policy": Policy.from_dict(values["policy"]), "low": low, "left": tuple(values["left"])})


def unit_of(values: Mapping[str, Any]) -> Unit:
    """The unit that `to_dict()` described."""
    return Unit(**{**values, **_numbers(values, ("error", "sensitivity", "seconds_float32", "seconds_low", "cast_seconds"))})


def result_of(values: Mapping[str, Any]) -> TuneResult:
    """The result that `to_dict()` described."""
    trials = tuple(map(trial_of, values["trials"]))
    fields = {
        **{name: value for name, value in values.items() if name not in _NESTED},
        "policy": Policy.from_dict(values["policy"]),
        "best": next(trial for trial in trials if trial.name == values["best"]),
        "trials": trials,
        "units": tuple(map(unit_of, values["units"])),
        "flows": tuple(Flow(**each) for each in values["flows"]),
        "tolerance": Tolerance(**values["tolerance"]),
        "notes": tuple(values["notes"]),
    }
    return TuneResult(**{**fields, **_numbers(fields, ("predicted", "left"))})


def _numbers(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Those of the values that were numbers which JSON has no form for."""
    return {name: float(values[name]) for name in names if isinstance(values[name], str)}
