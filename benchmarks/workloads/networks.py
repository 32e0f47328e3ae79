"""Networks in plain torch: MLP, residual network, U-Net, LSTM, and a block for the depth figure."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(width: int, depth: int, classes: int = 10) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(width: int, blocks: tuple[int, ...], classes: int = 10) -> nn.Sequential:
    """Return a residual network: each stage has twice the channels and half the resolution of the one before."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            out = width * 2**stage
            layers.append(_Residual(channels, out, 2 if stage and not block else 1))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _twice(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, 1, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
        nn.Conv2d(out, out, 3, 1, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A U-Net with `levels` lower resolutions and skip connections."""

    def __init__(self, width: int, levels: int, classes: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList([_twice(3, width), *(_twice(a, b) for a, b in itertools.pairwise(widths))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths)])
        self.join = nn.ModuleList([_twice(2 * a, a) for a in widths[:-1]])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            passed.append(x)
        passed.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([passed.pop(), up(x)], 1))
        return self.head(x)


class Recurrent(nn.Module):
    """An embedding, LSTM layers, and the next token's logits."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Block(nn.Module):
    """One layer of a transformer, from small ordinary ops."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        mixed = torch.matmul(F.softmax(scores, -1), v).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))
