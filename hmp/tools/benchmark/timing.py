"""The meter of times: seconds of a step, the least of some, turns that interleave several, and ratios of them round by round.

benchmark() and tune() time with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
clock = time.perf_counter


def seconds_of(step: Callable[[], T], count: int, device: torch.device) -> tuple[float, T]:
    """Return the seconds a step, over `count` steps, one or more, and what the last one returned."""
    synchronize(device)
    start = clock()
    for _ in range(count):
        result = step()
    synchronize(device)
    return (clock() - start) / count, result


def least_seconds(steps: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[float]:
    """Return the seconds of each step in its least disturbed round; in a round each is run once."""
    best = [math.inf] * len(steps)
    for _ in range(rounds):
        for at, step in enumerate(steps):
            best[at] = min(best[at], seconds_of(step, 1, device)[0])
    return best


def rotated(things: Sequence[T], number: int) -> list[T]:
    """Return the variants in the order of round `number`: each is the first of a round as often as the others."""
    first = number % len(things)
    return [*things[first:], *things[:first]]


def ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of `seconds` to `base` in each round.

    Rounds are compared, not medians: what slows a whole round down leaves its ratio as it is.
    """
    return [own / its for own, its in zip(seconds, base, strict=False)]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type == device.type:
        torch.accelerator.synchronize(device)
    else:
        wait = getattr(getattr(torch, device.type, None), "synchronize", None)
        if wait is not None:
            wait()
