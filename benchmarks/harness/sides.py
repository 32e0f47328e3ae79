"""The sides of a comparison: what is active for a whole visit, and the context that every step enters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

import hmp

T = TypeVar("T")
LOW = torch.bfloat16


@dataclass(frozen=True)
class Side:
    """One way to run a step. `visit` is entered around many steps and not timed; each step enters `region`, if there is one."""

    name: str
    visit: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    region: Callable[[], contextlib.AbstractContextManager[object]] | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Call the function with this side's casts, inside the visit."""
        if self.region is None:
            return function()
        with self.region():
            return function()


def policy_of(device: str) -> str:
    """Return the preset with torch.autocast's lists for the device."""
    return f"torch-{device}"


def plain(name: str = "plain") -> Side:
    """Return plain torch."""
    return Side(name)


def autocast(device: str) -> Side:
    """Return torch.autocast in bfloat16, entered by every step, as users do."""
    return Side("autocast", region=lambda: torch.autocast(device, dtype=LOW))


def under_hmp(policy: hmp.Policy | str, name: str = "hmp") -> Side:
    """Return hmp for the whole process, in bfloat16."""
    return Side(name, visit=lambda: converted(policy))


@contextlib.contextmanager
def converted(policy: hmp.Policy | str) -> Iterator[None]:
    """Convert inside the context, and leave torch unpatched outside."""
    hmp.convert(policy=policy, dtype=LOW)
    try:
        yield
    finally:
        hmp.revert()


def rotated(sides: list[T], round_number: int) -> list[T]:
    """Return the sides in the order of this round: each comes first equally often."""
    at = round_number % len(sides)
    return sides[at:] + sides[:at]
