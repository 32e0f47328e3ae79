"""Habana's fused optimizers and gradient clipping compute what torch's own compute, with Habana's defaults."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hmp
from hmp.compat import habana


@pytest.fixture(autouse=True)
def shim() -> Iterator[None]:
    with habana.install("cpu"):
        yield


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}], ids=["defaults", "options"])
def test_fused_adamw_is_adamw_bit_for_bit(options: dict, dtype: torch.dtype) -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    one, other = models(dtype)
    reference = torch.optim.AdamW(other.parameters(), **{"eps": 1e-6, "weight_decay": 0.0, **options}, fused=True)
    before = copy.deepcopy(one)
    ours = FusedAdamW(one.parameters(), **options)
    assert same(train(one, ours), train(other, reference))
    assert not same(list(one.parameters()), list(before.parameters()))
    # their states are the same, under the same names: checkpoints go both ways
    assert ours.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    for mine, theirs in zip(ours.state_dict()["state"].values(), reference.state_dict()["state"].values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert same([mine[name] for name in mine], [theirs[name] for name in mine])


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


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.5}], ids=str
)
def test_fused_sgd_is_sgd_bit_for_bit(options: dict) -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedSGD

    one, other = models()
    assert same(
        train(one, FusedSGD(one.parameters(), lr=0.05, **options)),
        train(other, torch.optim.SGD(other.parameters(), 0.05, **options, fused=True)),
    )
    with pytest.raises(TypeError, match="lr"):
        FusedSGD(one.parameters())


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


def test_r15_habanas_optimizers_are_never_cast() -> None:
    from habana_frameworks.torch.hpex.normalization import FusedClipNorm
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW, FusedSGD

    for kind in (FusedAdamW, FusedSGD):
        one, other = models()
        for model in (one, other):
            model(torch.ones(4, 5)).square().sum().backward()
        ours, theirs = kind(one.parameters(), lr=0.1), kind(other.parameters(), lr=0.1)
        FusedClipNorm(other.parameters(), 0.1).clip_norm()
        theirs.step()
        with hmp.convert(policy="habana-o2"):
            FusedClipNorm(one.parameters(), 0.1).clip_norm()
            ours.step()
        assert same(list(one.parameters()), list(other.parameters()))
