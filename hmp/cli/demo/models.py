"""The two models of the demo, written with plain torch functions so that each op of a list is visible."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


class DemoModel(nn.Module):
    """A classifier of (N, 1, 8, 8) pictures that says how it is trained and which listed ops it calls."""

    epochs: ClassVar[int]
    peak_learning_rate: ClassVar[float]
    # The names, as an op list spells them, of what a training step calls (the loss is cross_entropy).
    calls: ClassVar[frozenset[str]]


class ConvNet(DemoModel):
    """Two convolutions with batch norm, a dropout and a linear layer."""

    epochs = 10
    peak_learning_rate = 5e-3
    calls = frozenset("conv2d batch_norm relu dropout linear t cross_entropy".split())

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        logits: torch.Tensor = self.head(F.dropout(x.flatten(1), 0.25, self.training))
        return logits


class Transformer(DemoModel):
    """Two pre-norm encoder blocks with written-out attention; a token is one row of the picture.

    Wide enough that products, which precision makes faster or slower, take most of a step and casts little of it.
    """

    epochs = 14
    peak_learning_rate = 2e-3
    calls = frozenset("linear t embedding layer_norm mul matmul softmax dropout relu truediv cross_entropy".split())

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.squeeze(1)
        x = self.embed(rows) + self.position(torch.arange(rows.shape[1], device=rows.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).sum(1) / rows.shape[1])
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self._attend(self.norm1(x)))
        hidden = F.dropout(F.relu(self.up(self.norm2(x))), 0.1, self.training)
        result: torch.Tensor = x + self.down(hidden)
        return result

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
        weights = F.dropout(F.softmax(scores, -1), 0.1, self.training)
        return torch.matmul(weights, v).transpose(1, 2).flatten(2)


MODELS: dict[str, type[DemoModel]] = {"convnet": ConvNet, "transformer": Transformer}
