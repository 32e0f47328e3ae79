"""LARS around another optimizer, and TensorFlow's momentum, which Habana's scripts put in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .optimizer_parts import called, checked
from .optimizer_wrapper import OptimizerWrapper


class FusedLars(OptimizerWrapper):
    """LARS: `optimizer` steps with gradients that are as long as `eeta` times the parameter's norm.

    `skip_mask` has a value for each parameter, in their order: those with a true one get LARS and the optimizer's weight decay, the
    others (Habana's scripts: biases, batch norm) neither. Parameters of a group that is added later get both, until `skip_mask` says
    otherwise. A gradient becomes `(grad + weight_decay * param) * eeta * |param| / (|grad| + weight_decay * |param| + eps)`, or stays
    what it is where a norm is 0. The rest is the optimizer's own, whose state, groups and learning rates these are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, skip_mask: Sequence[Any], eeta: float = 0.001, eps: float = 1e-8) -> None:
        checked("FusedLars", eeta=eeta, eps=eps)
        super().__init__(optimizer)
        self.skip_mask = [bool(each) for each in skip_mask]
        self.eeta, self.eps = eeta, eps
        self._check_mask()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "eeta": self.eeta, "eps": self.eps, "skip_mask": self.skip_mask}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the group to the optimizer's; its parameters get LARS."""
        super().add_param_group(param_group)
        self.skip_mask += [True] * len(self.param_groups[-1]["params"])

    def _check_mask(self) -> None:
        count = sum(len(group["params"]) for group in self.param_groups)
        if len(self.skip_mask) != count:
            raise ValueError(
                f"FusedLars: skip_mask has {len(self.skip_mask)} values for {count} parameters; give one for each, in their order"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure`, called with gradients enabled, returned."""
        loss = called(closure)
        self._check_mask()  # the optimizer within may have been given another group
        mask = iter(self.skip_mask)
        decays = [(group, group["weight_decay"]) for group in self.param_groups if "weight_decay" in group]
        try:
            for group in self.param_groups:
                decay = group.get("weight_decay", 0)
                for param in group["params"]:
                    if next(mask) and param.grad is not None:
                        self._scale(param, param.grad, decay)
            for group, _ in decays:
                group["weight_decay"] = 0
            self.optim.step()
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
        return loss

    def _scale(self, param: torch.Tensor, grad: torch.Tensor, decay: float) -> None:
        of_param, of_grad = (torch.linalg.vector_norm(each, dtype=_norms_in(each)) for each in (param, grad))
        ratio = self.eeta * of_param / (of_grad + decay * of_param + self.eps)
        has_norms = (of_param > 0) & (of_grad > 0)
        scaled = (grad.to(ratio) + decay * param.to(ratio)) * ratio
        grad.copy_(torch.where(has_norms, scaled, grad.to(ratio)))


def _norms_in(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


class FusedResourceApplyMomentum(torch.optim.SGD):
    """TensorFlow's momentum: `accum = momentum * accum + grad; param -= lr * accum`, which is torch's SGD without dampening."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float = 0) -> None:
        super().__init__(params, lr, momentum, weight_decay=weight_decay)
