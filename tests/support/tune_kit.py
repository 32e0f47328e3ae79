"""Small tasks for tune(): cheap to train, and each with something to find."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import hmp


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Perceptron(nn.Module):
    """Four ops that are decided: linear, relu, layer_norm, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.second(F.relu(self.norm(self.first(x)))), -1)


def perceptron() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    return Perceptron(), [torch.randn(32, 16) for _ in range(3)]


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss without an op that is decided: the sums are told the targets by the inputs."""
    with hmp.disable_casts():
        target = (x[:, :8] > 0).float()
    return (model(x).float() - target).square().mean()


class Overflowing(nn.Module):
    """exp of what float32 holds and float16 does not, then a logarithm: NaN in float16's backward, healthy in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.inner(x) + 15.0
        return self.out(torch.log(torch.exp(scores)) - 15.0)


def overflowing() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(1)
    return Overflowing(), [torch.randn(16, 8) for _ in range(2)]


class Rotary(nn.Module):
    """Positions times frequencies: in bfloat16 positions beyond 256 are not distinct, and the model cannot tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 1)
        self.register_buffer("frequencies", 1.0 / 100.0 ** (torch.arange(16) / 16))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        angles = torch.mul(positions[:, None], self.frequencies)
        return self.out(torch.cat([angles.sin(), angles.cos()], -1))


def rotary() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(2)
    return Rotary(), [torch.randint(1_000, 4_000, (64,)).float() for _ in range(3)]


def parity(model: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """How badly the model tells a function of the position that changes within a few positions."""
    with hmp.disable_casts():
        target = torch.sin(positions)[:, None]
    return (model(positions).float() - target).square().mean()


def to_sines(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """How far the model's three numbers are from the sines of its first three inputs."""
    result = model(x).float()
    with hmp.disable_casts():
        return (result - x[:, :3].sin()).square().mean()


def trained(model: nn.Module, batches: list[torch.Tensor], loss, steps: int, make=sgd, around=None) -> float:
    """The mean loss of the last pass, by a loop of its own; `around` is put around every step."""
    from contextlib import nullcontext

    optimizer, losses = make(model), []
    for at in range(steps):
        optimizer.zero_grad()
        with nullcontext() if around is None else around():
            value = loss(model, batches[at % len(batches)])
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return sum(losses[-len(batches) :]) / len(batches)
