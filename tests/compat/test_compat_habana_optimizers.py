"""Habana's fused optimizers, gradient clipping and kernels compute what plain torch does, or what is computed here by hand in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import hmp
from hmp.compat import habana
from low_kernels_kit import as_computed
from trap_kit import policy

pytestmark = pytest.mark.usefixtures("hpu_on_cpu")


def models(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)
    return model, copy.deepcopy(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator).to(dtype)).square().sum().backward()
        optimizer.step()
    return list(model.parameters())


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


F32, F64, LOW = torch.float32, torch.float64, torch.bfloat16
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("AdamW", {}, F32),
        ("AdamW", OPTIONS, LOW),
        ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, F32),
        ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}, F32),
    ],
)
def test_fused_steps_are_torchs_bit_for_bit(name: str, options: dict, dtype: torch.dtype) -> None:
    from habana_frameworks.torch.hpex import optimizers

    one, other = models(dtype)
    habanas = {"eps": 1e-6, "weight_decay": 0.0} if name == "AdamW" else {}
    reference = getattr(torch.optim, name)(other.parameters(), **{**habanas, **options}, fused=True)
    before = copy.deepcopy(one)
    ours = getattr(optimizers, f"Fused{name}")(one.parameters(), **options)
    assert same(train(one, ours), train(other, reference))
    assert not same(list(one.parameters()), list(before.parameters()))
    # their states are the same, under the same names: checkpoints go both ways
    assert ours.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    for mine, theirs in zip(ours.state_dict()["state"].values(), reference.state_dict()["state"].values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] is theirs[name] is None or torch.equal(mine[name], theirs[name]) for name in mine)


def test_fused_adamw_without_bias_correction_leaves_out_both_divisions() -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    start = torch.randn(6, dtype=torch.float64)
    parameter, expected = nn.Parameter(start.clone()), start.clone()
    optimizer = FusedAdamW([parameter], lr=0.1, weight_decay=0.2, bias_correction=False)
    mean, square = torch.zeros(6).double(), torch.zeros(6).double()
    for step in range(1, 4):
        gradient = torch.randn(6, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * mean / (square.sqrt() + 1e-6)
        assert torch.allclose(parameter, expected, rtol=1e-12)
        assert optimizer.state[parameter]["step"].item() == step


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_fused_clip_norm_is_clip_grad_norm(max_norm: float) -> None:
    from habana_frameworks.torch.hpex.normalization import FusedClipNorm

    one, other = models()
    for model in (one, other):
        model(torch.ones(4, 5)).square().sum().backward()
    unclipped = [parameter.grad.clone() for parameter in one.parameters()]
    norm = FusedClipNorm(one.parameters(), max_norm).clip_norm(one.parameters())
    assert torch.equal(norm, nn.utils.clip_grad_norm_(other.parameters(), max_norm))
    assert same([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])
    assert same([p.grad for p in one.parameters()], unclipped) is (max_norm > 1)


def test_attention_is_torchs_and_cast_as_the_op_is() -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    query, key, value = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    mask = torch.randn(5, 5)
    exact = functional.scaled_dot_product_attention
    assert torch.equal(FusedSDPA.apply(query, key, value, mask, 0.0, False, 0.3), exact(query, key, value, mask, scale=0.3))
    assert torch.equal(FusedSDPA.apply(query, key, value, None, 0.0, True, None, "fast", True), exact(query, key, value, is_causal=True))
    torch.manual_seed(1)
    dropped = FusedSDPA.apply(query, key, value, None, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropped, exact(query, key, value, dropout_p=0.5))
    with hmp.casts(hmp.Policy(bf16=["scaled_dot_product_attention"])):
        low = FusedSDPA.apply(query, key, value)
    assert torch.equal(low, as_computed(exact)(query.to(LOW), key.to(LOW), value.to(LOW)))
    low.sum().backward()
    assert all(each.grad is not None and each.grad.dtype is torch.float32 for each in (query, key, value))
    with pytest.raises(hmp.HmpError, match=r"expected no valid_sequence_lengths .*; pass a mask as attn_mask"):
        FusedSDPA.apply(query, key, value, None, 0.0, False, None, "fast", True, torch.tensor([5, 3]))


def test_the_rms_norm_is_torchs_and_cast_as_the_op_is() -> None:
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    by_hand = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = FusedRMSNorm.apply(x, weight, 1e-5, True, 0)
    torch.testing.assert_close(found.double(), by_hand, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(by_hand.sum(), (x, weight))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (x, weight)), expected, rtol=1e-4, atol=1e-5)
    with hmp.casts(hmp.Policy(bf16=["rms_norm"])):
        assert torch.equal(FusedRMSNorm.apply(x, weight, 1e-5), functional.rms_norm(x.to(LOW), (8,), weight.to(LOW), 1e-5))


@pytest.mark.usefixtures("fresh_compiler", "inductor_has_compiled")
@pytest.mark.slow
# without vectors: torch's own vector code does not compile for each ATEN_CPU_CAPABILITY
@torch._inductor.config.patch({"cpp.simdlen": 1})
def test_the_backend_of_gaudi_compiles_with_torchs_own_and_goes_with_the_shim() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU()), torch.randn(3, 4)
    compiled = torch.compile(model, backend="hpu_backend", options={"force_static_compile": True})
    torch.testing.assert_close(compiled(x), model(x))
    habana.uninstall()
    with pytest.raises(Exception, match="hpu_backend"):
        torch.compile(model, backend="hpu_backend")


def parameters(dtype: torch.dtype = F64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(4, 3, generator=generator, dtype=F64), torch.randn(4, generator=generator, dtype=F64), torch.zeros(2, dtype=F64)]
    return [nn.Parameter(each.to(dtype)) for each in values]


def gradients(step: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=F64) * scale for shape in ((4, 3), (4,), (2,))]


def take(optimizer: Any, steps: int = 4, scale: float = 1.0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
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
        take(FusedLamb(given, **options), scale=scale)
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
    take(ours)
    for found, by_hand in zip(params, lars_by_hand(mask, decay, 0.5, 0.9, 0.02, 1e-4), strict=True):
        torch.testing.assert_close(found.detach(), by_hand, rtol=1e-12, atol=1e-14)
    assert inner.param_groups[0]["weight_decay"] == decay


ALL = policy(bf16=["mul", "add", "div", "sqrt", "norm", "sub", "copy_", "linalg.vector_norm", "stack", "where"])


def test_r15_steps_are_those_without_hmp_under_any_lists() -> None:
    from habana_frameworks.torch.hpex import normalization, optimizers

    def stepped(name: str) -> list[nn.Parameter]:
        params = parameters(F32)
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


Optimizer = torch.optim.Optimizer


def seen(value: Any) -> Any:
    """What == compares: numbers for tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: seen(each) for key, each in value.items()}
    return [seen(each) for each in value] if isinstance(value, (list, tuple)) else value


# Each does something with an optimizer and the one within, which are one for the twin: the optimizer to look at then, what was seen.
Treated = tuple[Optimizer, Any]


def deep_copied(optimizer: Optimizer, within: Optimizer) -> Treated:
    take(optimizer)
    other = copy.deepcopy(optimizer)
    take(optimizer)  # the copy does not follow
    return other, optimizer.state_dict()


def scheduled(optimizer: Optimizer, within: Optimizer) -> Treated:
    both = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.StepLR(optimizer, 3, 0.5)]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    rates = []
    for loss in (1.0, 0.5, 0.5, 0.6):
        take(optimizer, 1)
        for scheduler in both:
            scheduler.step()
        plateau.step(loss)
        rates.append(within.param_groups[0]["lr"])
    return optimizer, [rates, len(set(rates))]


def scaled(optimizer: Optimizer, within: Optimizer) -> Treated:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales, params = [], optimizer.param_groups[0]["params"][:2]  # the third is zero, and Inf times zero NaN
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(sum(param.square().sum() for param in params) * factor).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(params, 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales += [scaler.get_scale(), norm]
    return optimizer, scales


def loaded(optimizer: Optimizer, within: Optimizer) -> Treated:
    take(optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    take(optimizer, 1)
    optimizer.load_state_dict(kept)
    with pytest.raises(ValueError, match="different number of parameter groups") as refused:
        optimizer.load_state_dict({**kept, "param_groups": []})
    return optimizer, [kept, str(refused.value)]


TREATMENTS = [deep_copied, scheduled, scaled, loaded]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("treat", TREATMENTS, ids=lambda treat: treat.__name__)
def test_it_is_treated_as_the_one_within(treat: Callable[..., Treated]) -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedLars

    plain, inner = (torch.optim.SGD(parameters(F32), 0.1, 0.9) for _ in range(2))
    lars = FusedLars(inner, [0] * len(parameters()), eeta=0.1)  # whose mask leaves every parameter to the one within
    (theirs, they_saw), (ours, we_saw) = treat(plain, plain), treat(lars, inner)
    assert seen(we_saw) == seen(they_saw)
    take(theirs)
    take(ours)
    assert type(ours).__name__ == "FusedLars"
    assert seen(ours.state_dict()) == seen(theirs.state_dict())
    assert seen([group["params"] for group in ours.param_groups]) == seen([group["params"] for group in theirs.param_groups])
