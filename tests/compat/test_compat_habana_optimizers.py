"""Habana's fused optimizers, gradient clipping and kernels, and what else of its names computes, compute what plain torch does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import hmp
from hmp.compat import habana
from low_kernels_kit import as_computed

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


F32, LOW = torch.float32, torch.bfloat16
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


LOW = torch.bfloat16


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
