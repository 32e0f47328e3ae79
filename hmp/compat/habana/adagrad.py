"""`habana_frameworks.torch.hpex.optimizers.FusedAdagrad`: Adagrad of torch, on its fused kernel on the CPU and foreach elsewhere."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FusedAdagrad"]


class FusedAdagrad(torch.optim.Adagrad):
    """Adagrad as torch.optim.Adagrad computes it, in the fused kernel that torch has of it for the CPU, else of foreach kernels."""

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
        self._choose_kernels()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group of parameters."""
        super().add_param_group(param_group)
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        for group in self.param_groups:
            fused = all(param.device.type == "cpu" and param.is_floating_point() for param in group["params"])
            group["fused"], group["foreach"] = fused, not fused
