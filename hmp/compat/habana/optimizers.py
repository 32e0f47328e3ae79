"""`habana_frameworks.torch.hpex.optimizers`: Habana's fused optimizers on torch's fused kernels, or foreach where a device has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from .lamb import FusedLamb
from .lars import FusedLars, FusedResourceApplyMomentum
from .optimizer_parts import OnFusedKernels, called, checked, fusible

__all__ = ["FusedAdagrad", "FusedAdamW", "FusedLamb", "FusedLars", "FusedResourceApplyMomentum", "FusedSGD"]


class FusedAdamW(torch.optim.Optimizer):
    """AdamW with Habana's defaults: epsilon is 1e-6 and weight decay 0, where torch.optim.AdamW has 1e-8 and 1e-2.

    Computes what torch.optim.AdamW computes, and its state has the same names. `bias_correction=False` leaves out the division
    of both moments by 1 - beta ** step.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        checked("FusedAdamW", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure`, called with gradients enabled, returned."""
        loss = called(closure)
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        fused = fusible(params)
        for param in params:
            state = self.state[param]
            if not state:
                # fused kernels count on the device
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        states = [self.state[param] for param in params]
        steps = [state["step"] for state in states]
        if not group["bias_correction"]:
            # after infinitely many steps there is nothing left to correct
            torch._foreach_add_(steps, 1)
            steps = [torch.full_like(step, math.inf) for step in steps]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            foreach=not fused,
            fused=fused,
            has_complex=any(map(torch.is_complex, params)),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class FusedSGD(OnFusedKernels, torch.optim.SGD):
    """SGD as torch.optim.SGD computes it, on torch's fused kernels."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


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
