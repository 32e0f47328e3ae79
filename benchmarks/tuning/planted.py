"""Three failures planted in the first lists: each is out of tolerance, and a search has to find the op."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hmp import Policy

from . import vision
from .task import ACCURACY, LOSS, Task, annealed


def _moved(*ops: str, **changes: Any) -> Policy:
    """Return Habana's lists with `ops` on the BF16 list."""
    habana = Policy.load("habana")
    return habana.replace(bf16=habana.bf16 | set(ops), fp32=habana.fp32 - set(ops), promote=habana.promote - set(ops), **changes)


class Memory(nn.Module):
    """Compares its input with learned examples: softmax over squared distances times `sharpness`, so that the nearest counts."""

    def __init__(self, sharpness: float, rows: int, outputs: int) -> None:
        super().__init__()
        images, classes = vision.digits()[0]
        chosen = torch.randperm(len(images))[:rows]
        self.sharpness = sharpness
        self.keys = nn.Parameter(images.flatten(1)[chosen])
        self.values = nn.Parameter(F.one_hot(classes[chosen], outputs).float())
        self.head = nn.Sequential(nn.Linear(outputs, 32), nn.ReLU(), nn.Linear(32, outputs))

    def forward(self, images: Tensor) -> Tensor:
        distances = (images.flatten(1).unsqueeze(1) - self.keys).square().sum(-1)
        found = torch.matmul(F.softmax(-self.sharpness * distances, -1), self.values)
        return 4 * found + self.head(found)


def memory(seed: int, outputs: int = 10) -> nn.Module:
    torch.manual_seed(1000 + seed)  # not the batches' own: the examples would be those of the first batches
    return Memory(256.0, 160, outputs)


def _look_up(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


class Weather(nn.Module):
    """A temperature in kelvin: layers around 0, scaled to kelvin in float32."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )
        self.register_buffer("mean", torch.full((1,), 285.0))
        self.register_buffer("deviation", torch.full((1,), 10.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.mean + self.deviation * self.layers(x).squeeze(-1)


def _weather(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Weather()


def _observations(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return day, hour, latitude and height, and the temperature that follows from them, with noise of 1 K."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(60):
        day, hour, latitude, height = torch.rand(4, 128, generator=generator)
        year, clock, north = 6.2832 * day, 6.2832 * hour, 2 * latitude - 1
        kelvin = 300 - 30 * north**2 - 12 * north * torch.cos(year) - 4 * torch.cos(clock) * (1 - height) - 13 * height
        kelvin += 1.0 * torch.randn(128, generator=generator)
        found.append((torch.stack([year.cos(), year.sin(), clock.cos(), clock.sin(), north, 2 * height - 1], 1), kelvin))
    return found


def _squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Rotary(nn.Module):
    """Attention with rotary positions only: queries and keys are rotated by position times frequency."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        size = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("frequencies", 1000.0 ** -(torch.arange(0, size, 2) / size))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions.unsqueeze(-1) * self.frequencies
        cos, sin = angles.cos().unsqueeze(-3), angles.sin().unsqueeze(-3)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        weights = F.softmax(torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5, -1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).flatten(-2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class LookBack(nn.Module):
    """Predicts at each position an earlier token; the token at the position is the distance."""

    def __init__(self, tokens: int, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.norm, self.attention = nn.LayerNorm(width), Rotary(width, heads)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, tokens))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(self.norm(x), positions))


# Without noise the loss would go to zero, and nothing is a small part of that.
_TOKENS, _FURTHEST, _NOISE = 12, 3, 0.25


def _look_back(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return LookBack(_TOKENS)


def _far_windows(seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return windows of a long document: tokens, positions up to 8,000, and the token to predict at each position, some of them random."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(40):
        tokens = torch.randint(_TOKENS, (16, 32), generator=generator)
        positions = torch.randint(8000, (16, 1), generator=generator) + torch.arange(32)
        wanted = tokens.gather(1, (torch.arange(32) - 1 - tokens % _FURTHEST) % 32)
        wrong = torch.rand(tokens.shape, generator=generator) < _NOISE
        found.append((tokens, positions.float(), torch.where(wrong, torch.randint(_TOKENS, tokens.shape, generator=generator), wanted)))
    return found


def _told(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, positions, wanted = batch
    # the first places have nothing that far before them
    return F.cross_entropy(model(tokens, positions)[:, _FURTHEST:].flatten(0, 1), wanted[:, _FURTHEST:].flatten())


TASKS = [
    Task(
        "large-logits",
        "look-up in learnt examples of digits, softmax over logits of some 100,000, accuracy on 600 kept apart",
        memory,
        vision.batches,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        annealed(3e-3, 40),
        72,
        ACCURACY,
        metric=lambda model: vision.accuracy(model, _look_up),
        start=lambda: _moved("softmax", dtype="float16", name="habana, float16, with softmax"),
        broken="softmax over logits beyond float16, and the mul that makes them: NaN",
        culprits=frozenset({"softmax", "mul"}),
    ),
    Task(
        "low-loss",
        "temperatures in kelvin from day, hour, latitude and height, loss",
        _weather,
        _observations,
        _squared_error,
        annealed(1e-2, 40),
        180,
        LOSS,
        start=lambda: _moved("mse_loss", name="habana with mse_loss"),
        broken="mse_loss in bfloat16, whose numbers are 2 K apart at 285 K",
        culprits=frozenset({"mse_loss"}),
    ),
    Task(
        "rotary",
        "attention with rotary embeddings in windows of a long document, loss",
        _look_back,
        _far_windows,
        _told,
        annealed(3e-3, 40),
        240,
        LOSS,
        start=lambda: Policy.load("habana"),
        broken="mul in bfloat16: position times frequency loses its phase",
        culprits=frozenset({"mul"}),
    ),
]
