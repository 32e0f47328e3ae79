"""What quantising did to the operands of products in FP8, by op, module and role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...core import locks
from ...core.casting import Tensor, has_values
from ...core.fp8 import Statistics
from ...core.torch_private import has_storage, in_plain_autograd
from .rows import group_rows

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


class Fp8Rows:
    """Adds up the reports of each quantised tensor, from any thread."""

    def __init__(self) -> None:
        self._lock = locks.RLock()
        self._pending: list[tuple[tuple[str, str, str], Tensor]] = []
        self._rows: list[Fp8Row] = []

    def quantised(self, op: str, module: str, statistics: Statistics) -> None:
        """Note what quantising did to an operand."""
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
