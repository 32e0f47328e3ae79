"""How far from float32 a policy may go, in terms that people have: the loss, a metric, the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import HmpError

_KEYS = "'loss' (relative, 0.01 is one per cent), 'metric' (relative) and 'gradient' (least cosine, 0.99)"
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
            found.append(f"gradient cosine {gradient_cosine:.4f}, {self.gradient:.4f} asked for")
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
            raise HmpError(f"tolerance has {', '.join(map(repr, unknown)) or 'no bound'}; give {_KEYS}")
        found = Tolerance(**{name: _number(name, each) for name, each in value.items()})
    else:
        found = Tolerance(**{"metric" if has_metric else "loss": _number("tolerance", value)})
    if found.metric is not None and not has_metric:
        raise HmpError("tolerance has a bound for the metric, but metric= is missing; give metric=, a function of the model")
    if found.gradient is not None and not 0 < found.gradient <= 1:
        raise HmpError(f"invalid gradient={found.gradient!r}: expected a cosine above 0, such as 0.99")
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise HmpError(f"invalid {name}={value!r}: expected a number >= 0, or a mapping with {_KEYS}")
    return float(value)
