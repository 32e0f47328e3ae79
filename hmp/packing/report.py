"""What ops saved for backward packed, by op and module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..core import locks
from ..core.observe import modules
from ..tools.pages.page import Section, Table, Text, duration, module, nbytes, number, op, whole
from ..tools.record.rows import Recording, ReportPart, group_rows


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


class PackingRecording(Recording):
    """Adds up the reports of packed tensors, from any thread. `bounded` gives the name for a module's path."""

    def __init__(self, bounded: Callable[[str], str] = str) -> None:
        self._bounded = bounded
        self._lock = locks.RLock()
        self._sums: dict[tuple[str, str], list[Any]] = {}  # tensors, bytes, those left, two sums of squares, seconds

    def kept(self, op: str, tensor: torch.Tensor, nbytes: int | None) -> tuple[str, str]:
        """Count what an op saves."""
        key = op, self._bounded(modules.path)
        self._add(key, 1, tensor.nbytes, tensor.nbytes if nbytes is None else nbytes)
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


def _section(report: Any) -> Section | None:
    found = sorted(merged(report.kept), key=lambda row: -row.nbytes)
    if not found:
        return None
    rows = [
        [op(row.op), module(row.module), whole(row.tensors), nbytes(row.nbytes), nbytes(row.left),
         number(row.error, f"{100 * row.error:.2f} %"),
         duration(row.seconds)]
        for row in found
    ]  # fmt: skip
    told = (
        "Activations of the ops on the saved list: bytes as torch would save them, bytes after packing, the error of the unpacked values, "
        "and the time for packing and unpacking. The low-precision copy of a weight takes no bytes: backward casts the weight again."
    )
    columns = ("op", "module", ">tensors", ">bytes", ">packed", ">error", ">in packing")
    table = Table(columns, rows, label="Packed activations, by op and module", where="report.kept holds them")
    return Section("kept", "Packed", "Packed activations", [Text(told, is_soft=True), table])


PACKING_PART = ReportPart("kept", PackingRow, PackingRecording, merged, _section)
