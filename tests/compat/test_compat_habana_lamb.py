"""Habana's LAMB, LARS, momentum and moving average take the steps that are computed here by hand, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hmp
from trap_kit import policy

F64 = torch.float64


pytestmark = pytest.mark.usefixtures("hpu_on_cpu")


def parameters(dtype: torch.dtype = F64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(4, 3, generator=generator, dtype=F64), torch.randn(4, generator=generator, dtype=F64), torch.zeros(2, dtype=F64)]
    return [nn.Parameter(each.to(dtype)) for each in values]


def gradients(step: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=F64) * scale for shape in ((4, 3), (4,), (2,))]


def take(params: list[nn.Parameter], optimizer: Any, steps: int = 4, scale: float = 1.0) -> None:
    for step in range(steps):
        for param, grad in zip(params, gradients(step, scale), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


def lamb_by_hand(options: dict[str, Any], steps: int = 4, scale: float = 1.0) -> list[torch.Tensor]:
    """Element by element, as NVIDIA's multi_tensor_lamb: the two stages of one step after the other."""
    chosen = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "adam_w_mode": True,
        "grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False, **options,
    }  # fmt: skip
    beta1, beta2 = chosen["betas"]
    values = [each.detach().clone() for each in parameters()]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in values]
    for step in range(1, steps + 1):
        grads = gradients(step - 1, scale)
        norm = math.sqrt(sum(float((each * each).sum()) for each in grads))
        limit = chosen["max_grad_norm"]
        clip = norm / limit if limit > 0 and norm > limit else 1.0
        for value, grad, (m, v) in zip(values, grads, moments, strict=True):
            scaled = grad / clip
            if not chosen["adam_w_mode"]:
                scaled = scaled + chosen["weight_decay"] * value
            m.copy_(beta1 * m + (1 - beta1 if chosen["grad_averaging"] else 1) * scaled)
            v.copy_(beta2 * v + (1 - beta2) * scaled * scaled)
            corrections = (1 - beta1**step, 1 - beta2**step) if chosen["bias_correction"] else (1, 1)
            update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + chosen["eps"])
            if chosen["adam_w_mode"]:
                update = update + chosen["weight_decay"] * value
            ratio = 1.0
            if chosen["weight_decay"] or chosen["use_nvlamb"]:
                of_value, of_update = float(value.norm()), float(update.norm())
                ratio = of_value / of_update if of_value > 0 and of_update > 0 else 1.0
            value.sub_(chosen["lr"] * ratio * update)
    return values


LAMBS = {
    "defaults": {},
    "options": {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3, "bias_correction": False},
    "decay in the gradient": {"lr": 0.05, "adam_w_mode": False, "weight_decay": 0.2},
    "gradient whole": {"lr": 0.05, "grad_averaging": False},
    "no clipping": {"lr": 0.05, "max_grad_norm": 0.0, "weight_decay": 0.0},
    "nvlamb": {"lr": 0.05, "weight_decay": 0.0, "use_nvlamb": True},
}


@pytest.mark.parametrize("options", LAMBS.values(), ids=LAMBS)
def test_fused_lamb_takes_the_steps_computed_by_hand(options: dict[str, Any]) -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedLamb

    for in_groups, scale in ((False, 0.01), (True, 5.0)):  # what is clipped by is the norm of all, which is below the limit and above
        params = parameters()
        before = [each.detach().clone() for each in params]
        given = [{"params": params[:1]}, {"params": params[1:]}] if in_groups else params
        take(params, FusedLamb(given, **options), scale=scale)
        for ours, by_hand in zip(params, lamb_by_hand(options, scale=scale), strict=True):
            torch.testing.assert_close(ours.detach(), by_hand, rtol=1e-12, atol=1e-14)
        assert not any(map(torch.equal, params, before))
    assert torch.equal(params[0].grad, gradients(3, scale)[0])  # the gradients are the user's


def lars_by_hand(mask: list[int], decay: float, lr: float, momentum: float, eeta: float, eps: float, steps: int = 4) -> list[torch.Tensor]:
    values = [each.detach().clone() for each in parameters()]
    accumulated = [torch.zeros_like(each) for each in values]
    for step in range(steps):
        for value, accum, grad, applies in zip(values, accumulated, gradients(step), mask, strict=True):
            of_value, of_grad = float(value.norm()), float(grad.norm())
            used = grad
            if applies and of_value > 0 and of_grad > 0:
                used = (grad + decay * value) * (eeta * of_value / (of_grad + decay * of_value + eps))
            accum.copy_(momentum * accum + used)
            value.sub_(lr * accum)
    return values


@pytest.mark.parametrize(("mask", "decay"), [([1, 1, 1], 0.0), ([1, 0, 1], 0.1)], ids=str)
def test_fused_lars_takes_the_steps_computed_by_hand(mask: list[int], decay: float) -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedLars, FusedResourceApplyMomentum

    params = parameters()
    inner = FusedResourceApplyMomentum(params, lr=0.5, momentum=0.9, weight_decay=decay)
    ours = FusedLars(inner, mask, eeta=0.02, eps=1e-4)
    take(params, ours)
    for found, by_hand in zip(params, lars_by_hand(mask, decay, 0.5, 0.9, 0.02, 1e-4), strict=True):
        torch.testing.assert_close(found.detach(), by_hand, rtol=1e-12, atol=1e-14)
    assert inner.param_groups[0]["weight_decay"] == decay


ALL = policy(bf16=["mul", "add", "div", "sqrt", "norm", "sub", "copy_", "linalg.vector_norm", "stack", "where"])


def test_r15_steps_are_those_without_hmp_under_any_lists() -> None:
    from habana_frameworks.torch.hpex import normalization, optimizers

    def stepped(name: str) -> list[nn.Parameter]:
        params = parameters(torch.float32)
        make = getattr(optimizers, name)
        if name == "FusedLars":
            optimizer = make(torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.1), [1, 0, 1])
        else:
            optimizer = make(params, lr=0.1, **({"momentum": 0.9} if name == "FusedResourceApplyMomentum" else {}))
        for step in range(4):
            for param, grad in zip(params, gradients(step), strict=True):
                param.grad = grad.float()
            normalization.FusedClipNorm(params, 0.1).clip_norm()
            optimizer.step()
        return params

    names = ("FusedAdagrad", "FusedAdamW", "FusedLamb", "FusedLars", "FusedResourceApplyMomentum", "FusedSGD")
    plain = [stepped(name) for name in names]
    with hmp.convert(policy=ALL):
        for name, wanted in zip(names, plain, strict=True):
            assert all(map(torch.equal, stepped(name), wanted)), name


def test_fused_ema_follows_the_model() -> None:
    from habana_frameworks.torch.hpex.movingavrg import FusedEMA

    model = nn.Linear(3, 2).double()
    ours, average = FusedEMA(model, decay=0.9), model.weight.detach().clone()
    for n in range(1, 4):
        with torch.no_grad():
            model.weight.add_(n)
        ours.update(model)
        decay = 0.9 * (1 - math.exp(-n / 2000))
        average = average * decay + model.weight.detach() * (1 - decay)
    torch.testing.assert_close(ours.ema.weight, average, rtol=1e-12, atol=1e-12)
    assert ours.updates == 3 and not ours.ema.weight.requires_grad and model.weight.requires_grad
