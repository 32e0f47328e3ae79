"""`habana_frameworks.torch.hpex.optimizers.FusedAdagrad`: Adagrad of torch, on its fused kernel on the CPU and foreach elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from .fused_kernels import OnFusedKernels

__all__ = ["FusedAdagrad"]


class FusedAdagrad(OnFusedKernels, torch.optim.Adagrad):
    """Adagrad as torch.optim.Adagrad computes it, in the fused kernel that torch has of it for the CPU, else of foreach kernels."""

    fused_on = frozenset({"cpu"})

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps)
