"""Figures over rounds: medians, paired ratios and differences, with their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Of a normal distribution: its standard deviation over its median absolute deviation, and the standard error of
# a median over that of a mean.
_SIGMA_OF_MAD = 1.4826
_ERROR_OF_MEDIAN = 1.2533


def _few(count: int) -> float:
    """By how much the standard error of a median is widened to hold for 95 %, estimated from `count` samples: Student's quantile,
    and what the median absolute deviation of so few is too small by."""
    freedom = count - 1
    return (1.96 + 2.4 / freedom + 4.6 / freedom**2) * count / (count - 0.8)


@dataclass(frozen=True)
class Estimate:
    """A median over rounds and its noise: half the width of its 95 % interval, infinite for fewer than three rounds."""

    value: float
    noise: float
    rounds: int

    def text(self, digits: int = 3) -> str:
        """Return the figure as text, without noise if that is unknown."""
        return f"{self.value:.{digits}f}" + (f" ± {self.noise:.{digits}f}" if self.known else "")

    @property
    def known(self) -> bool:
        """Return True if there are enough samples for its noise."""
        return math.isfinite(self.noise)

    def above(self, limit: float) -> bool:
        """Return True if it is above `limit` by more than its noise, as far as that is known."""
        return self.value - limit > (self.noise if self.known else 0)


def mad(samples: Sequence[float]) -> float:
    """Return the median absolute deviation from the median."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of `samples` with its noise."""
    count = len(samples)
    noise = _few(count) * _ERROR_OF_MEDIAN * _SIGMA_OF_MAD * mad(samples) / math.sqrt(count) if count >= 3 else math.inf
    return Estimate(median(samples), noise, count)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the ratio of two sides, taken round by round, so that what slows a whole round cancels out."""
    return estimate([a / b for a, b in zip(numerators, denominators, strict=True)])


def paired_difference(minuends: Sequence[float], subtrahends: Sequence[float]) -> Estimate:
    """Return the difference of two sides, taken round by round."""
    return estimate([a - b for a, b in zip(minuends, subtrahends, strict=True)])


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ratios, NaN if there are none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def mean_ratio(ratios: Sequence[Estimate]) -> Estimate:
    """Return the geometric mean of independent ratios, with its noise."""
    value = geometric_mean([ratio.value for ratio in ratios])
    noise = value * math.hypot(*(ratio.noise / ratio.value for ratio in ratios)) / len(ratios)
    return Estimate(value, noise, min(ratio.rounds for ratio in ratios))


def ratio_of(a: Estimate, b: Estimate) -> Estimate:
    """Return the quotient of two independent estimates, with its noise."""
    if not b.value:
        return Estimate(math.nan, math.inf, a.rounds)
    value = a.value / b.value
    return Estimate(value, math.hypot(a.noise, value * b.noise) / abs(b.value), a.rounds)
