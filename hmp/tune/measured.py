"""What one watched step gave: by unit its time, its bytes and what rounding does, and what goes from unit to unit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..casting import Tensor
from ..context import disable_casts
from .decisions import Key


@dataclass
class Rounding:
    """What running in one dtype does to a unit's results, and so to the loss: sums over its calls. `unseen`: of some nothing is known."""

    errors: float = 0.0
    norms: float = 0.0
    loss_change: float = 0.0
    loss_variance: float = 0.0
    has_gradient: bool = False
    cannot: str = ""
    unseen: bool = False

    @property
    def error(self) -> float:
        """The relative error of all calls together."""
        return math.inf if self.cannot else math.sqrt(self.errors / self.norms) if self.norms else 0.0

    def sensitivity(self, loss: float) -> float | None:
        """The relative change of the loss; None where no gradient came back to tell."""
        if self.cannot:
            return math.inf
        if not self.has_gradient:
            return None if self.errors or self.unseen else 0.0
        return max(abs(self.loss_change), math.sqrt(self.loss_variance)) / max(abs(loss), 1e-12)

    def note(self, got: Tensor, wanted: Tensor) -> list[Any]:
        """Adds the error of one result beside float32's. Gives the hooks hung on the latter for what the error does to the loss."""
        if not wanted.is_floating_point() or wanted.layout is not torch.strided:
            return []
        reference = wanted.detach()
        error = got.to(torch.float32) - reference
        finite = torch.isfinite(reference)
        if not bool(torch.isfinite(error)[finite].all()):
            self.cannot = "gives NaN or Inf"
            return []
        error = torch.where(finite, error, 0.0)
        self.errors += float(error.double().square().sum())
        self.norms += float(torch.where(finite, reference, 0.0).double().square().sum())
        return [wanted.register_hook(self._first_order(error))] if wanted.requires_grad else []

    def _first_order(self, error: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            with disable_casts(), torch.no_grad():
                product = gradient.to(torch.float32) * error
                self.has_gradient = True
                self.loss_change += float(product.double().sum())
                self.loss_variance += float(product.double().square().sum())

        return hook


@dataclass
class Measured:
    """Sums over the calls of one unit in a step; `work` is floating-point operations of its products, `work_fp8` of those FP8 can take."""

    calls: int = 0
    low: Rounding = field(default_factory=Rounding)
    fp8: Rounding = field(default_factory=Rounding)
    seconds_float32: float = 0.0
    seconds_low: float = 0.0
    cast_seconds: float = 0.0
    saved_bytes: int = 0
    work: int = 0
    work_fp8: int = 0


@dataclass
class Flow:
    """Tensors that go from one unit to another in a step: what a cast of all of them costs."""

    seconds: float = 0.0
    bytes: int = 0


@dataclass
class Measurements:
    """What a watched step gave: by unit, and by pair of units that tensors go between."""

    units: dict[Key, Measured] = field(default_factory=dict)
    flows: dict[tuple[Key, Key], Flow] = field(default_factory=dict)
    loss: float = 0.0
