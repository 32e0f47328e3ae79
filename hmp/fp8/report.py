"""What quantising did to the operands of products in FP8, by op, module and role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..core import locks
from ..core.casting import Tensor, has_values
from ..core.torch_private import has_storage, in_plain_autograd
from ..tools.pages.page import Cell, Section, Table, Text, left_out, module, number, op, whole
from ..tools.record.rows import Recording, ReportPart, group_rows
from .quantization import Statistics

_ROWS = 200  # of the page's table
_PENDING = 512  # tensors whose figures wait on the device: to read one waits for it


@dataclass(frozen=True)
class Fp8Row:
    """The tensors that were quantised for the products of one op in one module, in one role.

    "input" (the left operand), "weight" (the right one) or "grad" (the result's gradient).

    Of `tensors` tensors: `amax` is the largest finite magnitude, `least_scale` and `greatest_scale` the range of the scales (a value is a
    number in the format times its scale), `saturated` and `flushed` the mean shares of elements at the format's largest number, and of
    those that became 0 and were not. One that a recipe quantises twice, for backward along the other axis, counts as two.
    """

    op: str
    module: str
    role: str
    tensors: int
    amax: float
    least_scale: float
    greatest_scale: float
    saturated: float
    flushed: float


class Fp8Recording(Recording):
    """Adds up the reports of each quantised tensor, from any thread."""

    def __init__(self) -> None:
        self._lock = locks.RLock()
        self._pending: list[tuple[tuple[str, str, str], Tensor]] = []
        self._rows: list[Fp8Row] = []

    def noted(self, about: str, op: str, module: str, value: Any) -> None:
        """Note what quantising did to an operand."""
        if about == "fp8":
            self._quantised(op, module, value)

    def _quantised(self, op: str, module: str, statistics: Statistics) -> None:
        if not has_values(statistics.amax) or not has_storage(statistics.amax) or not in_plain_autograd():
            return  # a meta or fake tensor, or one that stands for several (vmap): it has no figures
        with self._lock:
            self._pending.append(((op, module, statistics.role), statistics.figures()))
            if len(self._pending) >= _PENDING:
                self._read()

    def rows(self) -> list[Fp8Row]:
        """Return the reports so far, in the order of first uses."""
        with self._lock:
            self._read()
            return list(self._rows)

    def _read(self) -> None:
        self._rows = merged([*self._rows, *(Fp8Row(*key, 1, *figures.tolist()) for key, figures in self._pending)])
        self._pending.clear()


def merged(rows: Iterable[Fp8Row]) -> list[Fp8Row]:
    """Return the rows with those of one op, module and role taken together, as of several ranks."""
    means = dict.fromkeys(("saturated", "flushed"), "tensors")
    return group_rows(rows, ("op", "module", "role"), {"tensors": sum, "amax": max, "least_scale": min, "greatest_scale": max, **means})


def _section(report: Any) -> Section | None:
    found: list[Fp8Row] = report.fp8
    if not found:
        listed = any(policy.get("fp8") for policy in report.policies)
        told = "Nothing ran in FP8: the ops on the FP8 list were not called, or FP8 was impossible (hmp.fallbacks() says why)."
        return Section("fp8", "In FP8", "", [Text(told)]) if listed else None
    shown = sorted(found, key=lambda row: (-row.flushed, -row.saturated))[:_ROWS]
    rows = [
        [op(row.op), module(row.module), Cell(row.role), whole(row.tensors), number(row.amax, f"{row.amax:.3g}"),
         number(row.least_scale, f"{row.least_scale:.2g}"), number(row.greatest_scale, f"{row.greatest_scale:.2g}"),
         number(row.saturated, f"{100 * row.saturated:.2f} %"), number(row.flushed, f"{100 * row.flushed:.2f} %")]
        for row in shown
    ]  # fmt: skip
    told = (
        'Roles: left operand ("input"), right operand ("weight") and gradient of the result ("grad") of a matrix multiplication. '
        "Saturated: the share of elements clipped to the format's largest number. Flushed: the share rounded to zero. If much is "
        "flushed, the values of one tensor span more than the format's range: use a recipe with a scale for each row or block, or take "
        "this module off the FP8 list."
    )
    columns = ("op", "module", "role", ">tensors", ">amax", ">least scale", ">greatest scale", ">saturated", ">flushed to 0")
    note = left_out(shown, len(found), "rows, with most flushed", "`report.fp8`")
    table = Table(columns, rows, label="FP8 quantisation, by op, module and role", note=note, where="report.fp8 holds them")
    return Section("fp8", "In FP8", "Quantisation of the operands of FP8 matrix multiplications", [Text(told, is_soft=True), table])


FP8_PART = ReportPart("fp8", Fp8Row, Fp8Recording, merged, _section)
