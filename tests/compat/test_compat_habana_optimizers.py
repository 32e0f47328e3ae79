"""Habana's fused optimizers and gradient clipping compute what torch's own compute, with Habana's defaults."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

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
        *(("AdamW", options, dtype) for options in ({}, OPTIONS) for dtype in (F32, LOW)),
        ("SGD", {"lr": 0.05}, F32),
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


def test_fused_adamw_resumes_from_its_state() -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    whole, half = models()
    optimizer = FusedAdamW(whole.parameters(), lr=0.1)
    train(whole, optimizer, 3)
    train(whole, optimizer, 3)
    first = FusedAdamW(half.parameters(), lr=0.1)
    train(half, first, 3)
    second = FusedAdamW(half.parameters())
    second.load_state_dict(first.state_dict())
    assert same(train(half, second, 3), list(whole.parameters()))


def test_fused_adamw_takes_groups_and_a_closure() -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    parameter = nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([{"params": [parameter], "lr": 0.5}, {"params": [nn.Parameter(torch.ones(1))]}])

    def closure() -> torch.Tensor:
        loss = parameter.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    assert torch.allclose(parameter, torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "FusedAdamW: lr=-1 must be 0 or more"),
        ({"betas": (0.9, 1.0)}, "FusedAdamW: betas=(0.9, 1.0) must be from 0 up to, and without, 1"),
        ({"eps": -1e-6}, "FusedAdamW: eps=-1e-06 must be 0 or more"),
        ({"weight_decay": math.nan}, "FusedAdamW: weight_decay=nan must be 0 or more"),
    ],
)
def test_fused_adamw_refuses_what_cannot_be(options: dict, message: str) -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    with pytest.raises(ValueError, match="must be") as error:
        FusedAdamW([nn.Parameter(torch.ones(1))], **options)
    assert str(error.value) == message


@pytest.mark.parametrize("kind", ["FusedAdamW", "FusedSGD"])
def test_complex_parameters_take_the_foreach_kernels(kind: str) -> None:
    import habana_frameworks.torch.hpex.optimizers as optimizers

    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = getattr(optimizers, kind)([parameter], lr=0.1)
    parameter.grad = torch.full_like(parameter, 2j)
    optimizer.step()
    assert (parameter.imag < -0.05).all()


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
