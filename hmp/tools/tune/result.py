"""What a search keeps to, measures and finds: tolerance, units, trials of policies, and the result with the policy that was chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.policy import Policy
from ...errors import HmpError
from ..formatting import Word, json_values, of_json, versioned
from ..pages.page import Page, Result
from .decisions import Key

_KEYS = "'loss' (relative, 0.01 is one per cent), 'metric' (relative) and 'gradient' (smallest cosine similarity, such as 0.99)"
_FIRST_ORDER = 0.01  # where neither loss nor metric is bounded


@dataclass(frozen=True)
class Tolerance:
    """The bounds a policy must keep, None for none.

    `loss` is the most by which it may differ from float32's, relative to it, and `metric` the most by which it may be worse; `gradient` is
    the least cosine of the gradient with float32's.

    A loss that is far below float32's isn't better: it underflowed, or the model learns something else.
    """

    loss: float | None = None
    metric: float | None = None
    gradient: float | None = None

    @property
    def first_order(self) -> float:
        """Return what the changes of the loss by single units, to first order, may add up to in the first set that is tried."""
        return self.loss or self.metric or _FIRST_ORDER

    def exceeded(self, loss_change: float, metric_change: float | None, gradient_cosine: float | None) -> str:
        """Return what is beyond the bounds, "" for nothing. A number that is not finite is beyond every bound."""
        found = []
        if math.isnan(loss_change) or math.isinf(loss_change):
            found.append("the loss is not finite")
        elif self.loss is not None and abs(loss_change) > self.loss:
            found.append(f"loss {loss_change:+.2%}, {self.loss:.2%} allowed")
        if self.metric is not None and metric_change is not None and not metric_change <= self.metric:
            found.append(f"metric worse by {metric_change:.2%}, {self.metric:.2%} allowed")
        if self.gradient is not None and gradient_cosine is not None and not gradient_cosine >= self.gradient:
            found.append(f"gradient cosine {gradient_cosine:.4f}, at least {self.gradient:.4f} needed")
        return "; ".join(found)

    def __str__(self) -> str:
        parts = [
            None if self.loss is None else f"loss within {self.loss:.2%} of float32's",
            None if self.metric is None else f"metric at most {self.metric:.2%} worse",
            None if self.gradient is None else f"gradient cosine at least {self.gradient:g}",
        ]
        return ", ".join(filter(None, parts))


def as_tolerance(value: float | Mapping[str, float] | Tolerance, has_metric: bool) -> Tolerance:
    """Return the user's bounds: a number is for the metric if there is one, else for the loss. Raise HmpError for any other value."""
    if isinstance(value, Tolerance):
        found = value
    elif isinstance(value, Mapping):
        unknown = sorted(set(map(str, value)) - {"loss", "metric", "gradient"})
        if unknown or not value:
            raise HmpError(f"tolerance= expected {_KEYS}, got {', '.join(map(repr, unknown)) or 'an empty mapping'}")
        found = Tolerance(**{name: _number(name, each) for name, each in value.items()})
    else:
        found = Tolerance(**{"metric" if has_metric else "loss": _number("tolerance", value)})
    if found.metric is not None and not has_metric:
        raise HmpError("tolerance= has a bound for the metric, but metric= is missing; pass metric=, a function of the model")
    if found.gradient is not None and not 0 < found.gradient <= 1:
        raise HmpError(f"invalid gradient={found.gradient!r}: expected a cosine above 0, such as 0.99")
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise HmpError(f"invalid {name}={value!r}: expected a number >= 0, or a mapping with {_KEYS}")
    return float(value)


# Of float32's bytes or time: what an op gains less than this is not worth what it does to the loss.
LEAST_GAIN = 0.005


class Objective(Word):
    """What a search makes small: the time of a step, or what it saves for backward."""

    TIME = "time"
    MEMORY = "memory"


class Stopped(Word):
    """How a search ended."""

    SOLVED = "solved"
    BUDGET = "budget"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Unit:
    """What is decided at once: an op, or an op in one module, and what was measured of it in one step in float32.

    `module` is None where the op is decided for all modules together, "" for calls outside every module. `error` is the relative error
    ||low - float32|| / ||float32|| of the op alone on the same inputs, over all its calls; `sensitivity` the relative change of the loss
    that this error makes, to first order. Seconds are forward and backward of all calls of a step without casts; `cast_seconds` those of
    the casts of parameters and batches that the low-precision dtype needs. `saved_bytes` is how many bytes fewer it saves for backward
    there. Infinite where the op cannot run in the low-precision dtype, or gives NaN or Inf there.

    Where FP8 is one of the levels, `work` is the floating-point operations of its matrix products in forward, `work_fp8` of those that
    can run in FP8, and `error_fp8` and `sensitivity_fp8` are what the other two are, in FP8.
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
    work: int = 0
    work_fp8: int = 0
    error_fp8: float = math.inf
    sensitivity_fp8: float = math.inf

    @property
    def name(self) -> str:
        """As a list spells it."""
        return str(Key(self.op, self.module))


@dataclass(frozen=True)
class PackedUnit:
    """What is packed at once.

    What an op saves for backward, everywhere (`module` None) or in one module, and what was measured of it in one step with all that can be
    packed on the saved list.

    `nbytes` were kept and `left` of them are, for the first op that keeps a tensor; `error` is what packing changed, relative to it.
    """

    op: str
    module: str | None
    nbytes: int = 0
    left: int = 0
    error: float = 0.0

    @property
    def name(self) -> str:
        """As a list spells it."""
        return str(Key(self.op, self.module))


@dataclass(frozen=True)
class Trial:
    """One policy that the model was really trained or evaluated under.

    `low` holds the units that ran in the low-precision dtype, None for a policy that was taken as it is. `loss_change` and `metric_change`
    are relative to float32's, positive for a larger loss and for a worse metric; `gradient_cosine` is that of all parameters' gradients as
    one vector against float32's.
    `seconds` is the median time of a step, `ratio` that to float32's in the same rounds where both were timed; `saved_bytes` what
    a step saves for backward. `fits` is whether all of it is within the tolerance; `why` says what is not;
    `led` whether it was the best when it was made. `left` holds the decided ops that stayed on neither list, as the start has them, `fp8`
    the units that ran in FP8, `saved` those that kept packed what they save for backward.
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
    fp8: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Return whether it is within the tolerance, and why not."""
        return "yes" if self.fits else f"no: {self.why}" if self.why else "no"


def least_gain(reference: Trial, objective: Objective) -> float:
    """Return the least that is a gain over float32's trial, in bytes or seconds of a step."""
    return LEAST_GAIN * (reference.saved_bytes if objective == Objective.MEMORY else reference.seconds)


def trial_values(trial: Trial) -> dict[str, Any]:
    """Return the trial as plain values."""
    return {**vars(trial), "policy": trial.policy.to_dict()}


def trial_of(values: Mapping[str, Any]) -> Trial:
    """Return the trial that `trial_values()` described."""
    return replace(of_json(Trial, values), policy=Policy.from_dict(values["policy"]))


_NESTED = ("policy", "best", "trials", "units", "packed")


@dataclass(frozen=True, repr=False)
class TuneResult(Result):
    """The policy that was chosen, and everything that was measured on the way; `print(...)` shows it as a table.

    `policy` belongs to `best`, the cheapest trial within the tolerance. `trials` are in the order in which they ran, float32 first.
    `stopped` says why the search ended. `key` differs between searches that may not go on from each other's tune.json, part by part.
    `model` is the model's class, `date` when it ended, `hmp` and `torch` are versions. With the objective "bytes" `packed` has what was
    measured of units whose tensors can be packed, and `objective` is "memory".

    Example:
        >>> net, data = torch.nn.Linear(4, 1), [torch.randn(8, 4)]
        >>> result = hmp.tune(net, data, loss=lambda model, x: model(x).square().mean(), objective="memory", max_trials=8)
        >>> folder, values = result.save("tuned"), result.to_dict()
        >>> json, page = result.to_json("tune.json"), result.to_html("tune.html")
    """

    policy: Policy
    best: Trial
    trials: tuple[Trial, ...]
    units: tuple[Unit, ...]
    tolerance: Tolerance
    objective: Objective
    stopped: Stopped
    start: str
    seed: int
    steps: int
    device: str
    torch: str
    notes: tuple[str, ...] = ()
    folder: str | None = None
    key: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    date: str = ""
    hmp: str = ""
    packed: tuple[PackedUnit, ...] = ()

    def __getitem__(self, name: str) -> Trial:
        for trial in self.trials:
            if trial.name == name:
                return trial
        raise KeyError(f"expected the name of a trial, got {name!r}; the trials are {', '.join(trial.name for trial in self.trials)}")

    @property
    def share_in_fp8(self) -> float:
        """Return the share of the products' work (floating-point operations in forward) that runs in FP8 under `policy`."""
        work = sum(unit.work for unit in self.units)
        return sum(unit.work_fp8 for unit in self.units if unit.name in self.best.fp8) / work if work else 0.0

    def _page(self) -> Page:
        from .page import tuning_page  # here: it imports this module

        return tuning_page(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values.

        Returns:
            The values that `to_json()` writes.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NESTED}
        values["policy"] = self.policy.to_dict()
        values["best"] = self.best.name
        values["tolerance"] = asdict(self.tolerance)
        values["units"] = [asdict(unit) for unit in self.units]
        values["packed"] = [asdict(unit) for unit in self.packed]
        values["trials"] = [trial_values(trial) for trial in self.trials]
        plain: dict[str, Any] = json_values(versioned(values))
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
        from .lists import write  # here: it imports this module

        return write(self, Path(folder))


def result_of(values: Mapping[str, Any]) -> TuneResult:
    """Return the result that `to_dict()` described."""
    trials = tuple(map(trial_of, values["trials"]))
    return replace(
        of_json(TuneResult, {"packed": (), **values}),
        policy=Policy.from_dict(values["policy"]),
        best=next(trial for trial in trials if trial.name == values["best"]),
        trials=trials,
        units=tuple(of_json(Unit, each) for each in values["units"]),
        packed=tuple(of_json(PackedUnit, each) for each in values.get("packed", ())),
        tolerance=Tolerance(**values["tolerance"]),
    )
