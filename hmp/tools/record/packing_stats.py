"""What ops saved for backward packed, by op and module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...core import locks
from ...core.observe import Listener, modules
from .rows import group_rows


@dataclass(frozen=True)
class PackingRow:
    """What one op in one module saved for backward where the policy has it packed, weights apart.

    `tensors` of `nbytes` bytes were saved, those that several ops save once; `left` of these were held. That is all of what is integer,
    small, a statistic or the batch, and nothing of a weight's low-precision copy, which backward makes again. `error` is the root of what
    packing changed over that of the numbers themselves, each squared and summed, in the first 65,536 of each tensor; `seconds` were spent
    in packing and unpacking, as the threads saw them.
    """

    op: str
    module: str
    tensors: int
    nbytes: int
    left: int
    error: float
    seconds: float


class PackingRows(Listener):
    """Adds up the reports of packed tensors, from any thread. `module` gives the module whose call is running."""

    def __init__(self, module: Callable[[], str] = lambda: modules.path) -> None:
        self._module = module
        self._lock = locks.RLock()
        self._sums: dict[tuple[str, str], list[Any]] = {}  # tensors, bytes, those left, two sums of squares, seconds

    def kept(self, op: str, tensor: torch.Tensor, packed: int | None) -> tuple[str, str]:
        """Count what an op saves."""
        key = op, self._module()
        self._add(key, 1, tensor.nbytes, tensor.nbytes if packed is None else packed)
        return key

    def changed(self, about: tuple[str, str], saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Count what packing or unpacking it did."""
        self._add(about, 0, 0, -saved, sum(each[0] for each in errors), sum(each[1] for each in errors), seconds)

    def _add(self, key: tuple[str, str], *values: float) -> None:
        with self._lock:
            sums = self._sums.setdefault(key, [0, 0, 0, 0.0, 0.0, 0.0])
            for i, value in enumerate(values):
                sums[i] += value

    def rows(self) -> list[PackingRow]:
        """Return the reports so far, in the order of first uses."""
        with self._lock:
            return [
                PackingRow(op, module, tensors, nbytes, left, math.sqrt(changed / numbers) if numbers else 0.0, seconds)
                for (op, module), (tensors, nbytes, left, changed, numbers, seconds) in self._sums.items()
            ]


def merged(rows: Iterable[PackingRow]) -> list[PackingRow]:
    """Return the rows with those of one op and module taken together, as of several ranks; their error is the mean by bytes."""
    return group_rows(rows, ("op", "module"), {**dict.fromkeys(("tensors", "nbytes", "left", "seconds"), sum), "error": "nbytes"})
