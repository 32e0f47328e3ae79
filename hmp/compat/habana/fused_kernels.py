"""Optimizers of torch's own that run on its fused kernels, or on foreach kernels where a device has none."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch

# where torch 2.7 has fused kernels of SGD and AdamW
FUSED = frozenset({"cpu", "cuda", "xpu", "mps"})


class OnFusedKernels(torch.optim.Optimizer):
    """Stands before a class of torch's: each group of parameters is on fused kernels where all its devices are among `fused_on`."""

    fused_on: Set[str] = FUSED

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group of parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        fused = fusible(group["params"], self.fused_on)
        group["fused"], group["foreach"] = fused, not fused


def fusible(params: Iterable[torch.Tensor], devices: Set[str] = FUSED) -> bool:
    """Whether a fused kernel takes the parameters, which are on devices of these types."""
    return all(param.device.type in devices and param.is_floating_point() and param.layout is torch.strided for param in params)
