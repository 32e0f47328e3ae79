"""LAMB as Habana's `FusedLamb` and NVIDIA's compute it, of torch's foreach kernels.

The packages that have a LAMB compute another one (pytorch-optimizer's leaves the moments uncorrected and ends the norm of a weight at
10), or bring torchvision along (timm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .optimizer_parts import called, checked

Tensors = list[torch.Tensor]


class FusedLamb(torch.optim.Optimizer):
    """LAMB: Adam's step of each parameter, as long as `lr` times the parameter's norm.

    All gradients together are first scaled to the norm `max_grad_norm` where theirs is greater (0: never). Without `grad_averaging`
    the gradient enters the first moment whole. Weight decay is added to the step with `adam_w_mode`, else to the gradient. Parameters
    without weight decay take Adam's step as it is, unless `use_nvlamb`. `fused` is taken and means nothing here.
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        fused: bool = False,
    ) -> None:
        checked("FusedLamb", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm, "use_nvlamb": use_nvlamb,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Takes the gradients away, or fills them with zeros: as the argument says, else as `set_grad_none` did."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure`, called with gradients enabled, returned."""
        loss = called(closure)
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        gradients = [p.grad for _, params in groups for p in params]
        if not gradients:
            return loss
        if not all(each.is_floating_point() and each.layout is torch.strided for each in gradients):
            raise RuntimeError("FusedLamb takes no sparse gradients and no complex ones; give such parameters to another optimizer")
        norm = torch.nn.utils.get_total_norm(_wide(gradients))
        for group, params in groups:
            if params:
                self._update(group, params, norm)
        return loss

    def _update(self, group: dict[str, Any], params: Tensors, norm: torch.Tensor) -> None:
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        decay, limit = group["weight_decay"], group["max_grad_norm"]
        first, second = ([self._moment(param, name) for param in params] for name in ("exp_avg", "exp_avg_sq"))
        weights = _wide(params)
        gradients = _wide([param.grad for param in params if param.grad is not None])
        if limit > 0:
            gradients = [gradient / (norm.to(gradient) / limit).clamp(min=1) for gradient in gradients]
        if decay and not group["adam_w_mode"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        corrected = [1 - beta ** group["step"] if group["bias_correction"] else 1 for beta in (beta1, beta2)]
        below = torch._foreach_sqrt(torch._foreach_div(second, corrected[1]))
        torch._foreach_add_(below, group["eps"])
        steps = torch._foreach_div(torch._foreach_div(first, corrected[0]), below)
        if decay and group["adam_w_mode"]:
            torch._foreach_add_(steps, weights, alpha=decay)
        if decay or group["use_nvlamb"]:
            norms = zip(torch._foreach_norm(weights), torch._foreach_norm(steps), strict=True)
            for step, (of_weight, of_step) in zip(steps, norms, strict=True):
                step.mul_(torch.where((of_weight > 0) & (of_step > 0), of_weight / of_step, 1.0))
        for param, weight, step in zip(params, weights, steps, strict=True):
            param.copy_(weight.sub(step, alpha=group["lr"]))

    def _moment(self, param: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[param]
        found = state.get(name)
        if found is None:
            found = torch.zeros_like(param, memory_format=torch.preserve_format)
        state[name] = _wide([found])[0]  # load_state_dict() gives it the parameter's dtype
        moment: torch.Tensor = state[name]
        return moment


def _wide(tensors: Any) -> Tensors:
    """The tensors, those of low precision in float32."""
    return [each if each.dtype in (torch.float32, torch.float64) else each.float() for each in tensors]
