"""LARS around another optimizer, and TensorFlow's momentum, which Habana's scripts put in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .checked import checked


class FusedLars(torch.optim.Optimizer):
    """LARS: `optimizer` steps with gradients that are as long as `eeta` times the parameter's norm.

    `skip_mask` has a value for each parameter, in their order: those with a true one get LARS and the optimizer's weight decay, the
    others (Habana's scripts: biases, batch norm) neither. A gradient becomes `(grad + weight_decay * param) * eeta * |param| /
    (|grad| + weight_decay * |param| + eps)`, or stays what it is where a norm is 0. The rest is the optimizer's own, whose state,
    groups and learning rates these are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, skip_mask: Sequence[Any], eeta: float = 0.001, eps: float = 1e-8) -> None:
        checked("FusedLars", eeta=eeta, eps=eps)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if len(skip_mask) != count:
            raise ValueError(f"FusedLars: skip_mask has {len(skip_mask)} values for {count} parameters; give one for each, in their order")
        self.optim = optimizer
        self.skip_mask = [bool(each) for each in skip_mask]
        self.eeta, self.eps = eeta, eps
        self.defaults = optimizer.defaults
        self.__setstate__({})  # what torch's constructor makes, without groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's."""
        return self.optim.state

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads it into the optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the mask has no values for further parameters."""
        raise RuntimeError("FusedLars: its skip_mask has no values for further parameters; add them to the optimizer before it is wrapped")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure`, called with gradients enabled, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        mask = iter(self.skip_mask)
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0
                for param in group["params"]:
                    if next(mask) and param.grad is not None:
                        self._scale(param, param.grad, decay)
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
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
