"""What a search found: the policy that was chosen among those that were verified, and everything that was measured on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..formatting import json_values, json_written, of_json, versioned, written
from ..lists import Policy
from ..printers import printer
from .tolerance import Tolerance
from .trial import Flow, Objective, Packed, Stopped, Trial, Unit, trial_of, trial_values

_NESTED = ("policy", "best", "trials", "units", "flows", "packed")


@dataclass(frozen=True, repr=False)
class TuneResult:
    """The policy that was chosen, and everything that was measured on the way; `print(...)` shows it as a table.

    `policy` belongs to `best`, the cheapest trial within the tolerance. `trials` are in the order in which they ran, float32 first.
    `predicted` is the cost of a step that the solver expects of the best lists if there were no tolerance, in seconds or bytes against
    float32, and `left` how much of it the chosen lists leave behind. `stopped` says why the search ended. `key` tells searches apart
    that may not go on from each other's tune.json, part by part. `model` is the model's class, `date` when it ended, `hmp` and `torch` are
    versions. With the objective "bytes" `packed` has what was measured of units whose tensors can be packed, and `objective` is "memory".
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
    key: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    date: str = ""
    hmp: str = ""
    packed: tuple[Packed, ...] = ()

    def __getitem__(self, name: str) -> Trial:
        for trial in self.trials:
            if trial.name == name:
                return trial
        raise KeyError(f"no trial {name!r}; there are {', '.join(trial.name for trial in self.trials)}")

    @property
    def share_in_fp8(self) -> float:
        """The share of the products' work (floating-point operations in forward) that runs in FP8 under `policy`."""
        work = sum(unit.work for unit in self.units)
        return sum(unit.work_fp8 for unit in self.units if unit.name in self.best.fp8) / work if work else 0.0

    def __str__(self) -> str:
        return str(printer("TuneResult.__str__")(self))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values; numbers that are not finite are the strings "nan", "inf" and "-inf"."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NESTED}
        values["policy"] = self.policy.to_dict()
        values["best"] = self.best.name
        values["tolerance"] = asdict(self.tolerance)
        values["units"] = [asdict(unit) for unit in self.units]
        values["flows"] = [asdict(flow) for flow in self.flows]
        values["packed"] = [asdict(unit) for unit in self.packed]
        values["trials"] = [trial_values(trial) for trial in self.trials]
        plain: dict[str, Any] = json_values(versioned(values))
        return plain

    def to_json(self, path: str | Path) -> Path:
        """Writes `to_dict()` into the file `path`, which is returned."""
        return json_written(path, self.to_dict)

    def to_html(self, path: str | Path) -> Path:
        """Writes a page with the accuracy-speed curve of all trials into the file `path`, which is returned. Needs the extra `report`."""
        return written(path, lambda: printer("TuneResult.to_html")(self))

    def save(self, folder: str | Path) -> Path:
        """Writes the lists, each name with a comment that says why, and tune.json into `folder`, which is made and returned."""
        saved: Path = printer("TuneResult.save")(self, Path(folder))
        return saved


def result_of(values: Mapping[str, Any]) -> TuneResult:
    """The result that `to_dict()` described."""
    trials = tuple(map(trial_of, values["trials"]))
    return replace(
        of_json(TuneResult, {"packed": (), **values}),
        policy=Policy.from_dict(values["policy"]),
        best=next(trial for trial in trials if trial.name == values["best"]),
        trials=trials,
        units=tuple(of_json(Unit, each) for each in values["units"]),
        flows=tuple(of_json(Flow, each) for each in values["flows"]),
        packed=tuple(of_json(Packed, each) for each in values.get("packed", ())),
        tolerance=Tolerance(**values["tolerance"]),
    )
