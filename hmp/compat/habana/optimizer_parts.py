"""What Habana's optimizers are made of: arguments are checked, closures called, and groups put on fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch

_AT_LEAST_0 = (lambda value: bool(value >= 0), "0 or more")
_FRACTION = (lambda value: bool(0 <= value < 1), "from 0 up to, and without, 1")
_FRACTIONS = (lambda value: all(0 <= each < 1 for each in value), _FRACTION[1])
_WANTED: dict[str, Any] = {"betas": _FRACTIONS, "decay": _FRACTION}


def checked(optimizer: str, **values: Any) -> None:
    """Nothing, or ValueError for the first value that is not what one of its name must be."""
    for name, value in values.items():
        is_right, wanted = _WANTED.get(name, _AT_LEAST_0)
        if not is_right(value):
            raise ValueError(f"{optimizer}: {name}={value!r} must be {wanted}")


def called(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step, called with gradients enabled, returned; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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
