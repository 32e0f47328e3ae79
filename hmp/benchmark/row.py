"""What was measured of a step under one policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One policy. What could not be measured is None.

    `seconds` is the median time of a step over the `samples`, one sample a round; `spread` is their interquartile range in
    seconds. `ratio` is the median, over the rounds, of a sample divided by the baseline's sample of the same round. `memory` is in
    bytes; `first_loss` and `last_loss` are those of the first and the last step of the first sample; `loss_change` is how far the
    last loss moved between the rounds, which all did the same. `error` is what the step raised, if it did.
    """

    name: str
    description: str
    seconds: float | None = None
    spread: float | None = None
    ratio: float | None = None
    memory: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    loss_change: float | None = None
    error: str | None = None
    samples: tuple[float, ...] = ()
