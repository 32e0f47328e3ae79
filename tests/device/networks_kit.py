"""Small networks twice: as a user writes them, and with every cast of hmp's written out in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import hmp
from device_kit import BF16, DEVICE, F32, policy, tensor

WIDTH, OUT, ROWS = 256, 64, 32


def lists(dtype: torch.dtype = BF16) -> hmp.Policy:
    """What Plain writes out: linear in the low-precision dtype, the loss in float32; relu and the sum compute in what they are given."""
    return policy(bf16="linear", fp32="mse_loss", dtype=dtype)


class Net(torch.nn.Module):
    """Two linear layers wide enough for their casts to be shared, and a third use of the first one's input."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, device=DEVICE)
        self.second = torch.nn.Linear(WIDTH, OUT, device=DEVICE)
        self.beside = torch.nn.Linear(WIDTH, OUT, device=DEVICE)
        for number, each in enumerate(self.parameters()):
            each.data = tensor(*each.shape, seed=100 * seed + number) / 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + self.beside(x)


class Plain(Net):
    """The same with explicit casts: plain torch."""

    low = BF16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def linear(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
            return F.linear(x.to(self.low), layer.weight.to(self.low), layer.bias.to(self.low))

        return linear(torch.relu(linear(x, self.first)), self.second) + linear(x, self.beside)


class PlainHalf(Plain):
    """In float16."""

    low = torch.float16


def batch(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor(ROWS, WIDTH, seed=seed), tensor(ROWS, OUT, seed=seed + 1)


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Written so that it is the same with hmp and without: the result is cast by hand."""
    return F.mse_loss(net(x).to(F32), y)


def parameters(net: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in net.parameters()]
    assert all(g is not None for g in found), "a parameter has no gradient"
    return [g.detach().clone() for g in found if g is not None]
