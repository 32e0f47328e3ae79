"""A tiny training for trainers of other packages, and the same written out in plain torch with explicit casts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from low_kernels_kit import products_as_computed


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Softmax(1))


def batches(size: int = 8) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(32, 8), torch.rand(32, 4)), batch_size=size)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


@products_as_computed()
def forward_by_hand(
    network: nn.Sequential, x: torch.Tensor, low: torch.dtype = torch.bfloat16, tanh: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """What Habana's lists make of `net()`: linear and tanh in bfloat16, or in the dtypes that are given, softmax in float32."""
    first, _, second, _ = network
    hidden = torch.tanh(F.linear(x.to(low), first.weight.to(low), first.bias.to(low)).to(tanh))
    return F.softmax(F.linear(hidden.to(low), second.weight.to(low), second.bias.to(low)).float(), 1)


def train_by_hand(
    clip: Callable[[Any], Any] | None = None, accumulate: int = 1, epochs: int = 2, forward: Callable[..., torch.Tensor] = forward_by_hand
) -> tuple[list[float], nn.Sequential]:
    """The losses and the network of that training in plain torch."""
    network, losses = net(), []
    optimizer = sgd(network.parameters())
    for _ in range(epochs):
        for index, (x, y) in enumerate(batches()):
            loss = F.mse_loss(forward(network, x).float(), y)
            losses.append(loss.item())
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    clip(network.parameters())
                optimizer.step()
                optimizer.zero_grad()
    return losses, network


def assert_same_weights(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one, other), name
