"""Training steps that use a weight many times: cells in a loop, layers that share weights, a policy over an episode, an unrolled
optimizer, a fixed point, decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import of_transformers

Forward = Callable[[Any, dict[str, Tensor]], Tensor]


@dataclass
class Reused:
    """A model, its batch, and how one step's loss is computed from them."""

    title: str
    model: nn.Module
    batch: dict[str, Tensor]
    forward: Forward
    family: str = "shared layer"

    def loss(self) -> Tensor:
        return self.forward(self.model, self.batch)

    def to(self, device: str) -> Reused:
        """Return this, moved to the device."""
        self.model.to(device)
        self.batch = {name: value.to(device) for name, value in self.batch.items()}
        return self

    def exact(self) -> Reused:
        """Return the same in float64."""
        batch = {name: value.double() if value.is_floating_point() else value for name, value in self.batch.items()}
        return Reused(self.title, copy.deepcopy(self.model).double(), batch, self.forward, self.family)


def _cell(kind: str, inputs: int, width: int, steps: int, rows: int = 16) -> Reused:
    def forward(cell: Any, batch: dict[str, Tensor]) -> Tensor:
        zeros = batch["x"].new_zeros(rows, width)
        state: Any = (zeros, zeros) if kind == "LSTMCell" else zeros
        losses = []
        for x, target in zip(batch["x"], batch["target"], strict=True):
            state = cell(x, state)
            losses.append(F.mse_loss((state[0] if isinstance(state, tuple) else state).to(target.dtype), target))
        return torch.stack(losses).mean()

    batch = {"x": torch.randn(steps, rows, inputs), "target": torch.randn(steps, rows, width)}
    return Reused(f"{kind} {inputs} to {width}, {steps} steps", getattr(nn, kind)(inputs, width), batch, forward, "cell")


def _recurrent(kind: str, inputs: int, width: int, steps: int, rows: int = 16) -> Reused:
    def forward(net: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(net(batch["x"])[0].to(batch["target"].dtype), batch["target"])

    batch = {"x": torch.randn(steps, rows, inputs), "target": torch.randn(steps, rows, width)}
    return Reused(f"nn.{kind} {inputs} to {width}, {steps} steps", getattr(nn, kind)(inputs, width), batch, forward, "recurrent op")


def _linear(width: int, uses: int, rows: int) -> Reused:
    def forward(layer: Any, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for _ in range(uses):
            x = torch.tanh(layer(x))
        return x.to(batch["x"].dtype).square().mean()

    return Reused(f"Linear {width}, {uses} uses", nn.Linear(width, width), {"x": torch.randn(rows, width)}, forward)


def _conv(channels: int, uses: int) -> Reused:
    def forward(layer: Any, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for _ in range(uses):
            x = torch.tanh(layer(x))
        return x.to(batch["x"].dtype).square().mean()

    layer = nn.Conv2d(channels, channels, 3, padding=1)
    return Reused(f"conv of {channels} channels, {uses} uses", layer, {"x": torch.randn(4, channels, 32, 32)}, forward)


def _albert(width: int, depth: int) -> Reused:
    model = of_transformers(
        "AlbertForMaskedLM",
        vocab_size=500,
        embedding_size=width,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=64,
    )
    tokens = {"input_ids": torch.randint(5, 500, (4, 64)), "labels": torch.randint(5, 500, (4, 64))}
    return Reused(f"ALBERT {width}, {depth} layers", model, tokens, lambda model, batch: model(**batch).loss)


def _episode(steps: int, width: int = 64, rows: int = 32) -> Reused:
    """Return a policy that acts in a differentiable environment: one graph over the whole episode."""

    def forward(policy: Any, batch: dict[str, Tensor]) -> Tensor:
        state, cost = batch["state"], []
        for _ in range(steps):
            action = torch.tanh(policy(state)).to(state.dtype)
            state = state + 0.1 * (state.roll(1, 1) * 0.5 + action @ batch["acts"])
            cost.append(state.square().mean() + 0.01 * action.square().mean())
        return torch.stack(cost).mean()

    policy = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    return Reused(f"policy over {steps} steps", policy, {"state": torch.randn(rows, 16), "acts": torch.randn(4, 16)}, forward)


class _Learned(nn.Module):
    """A learned optimizer: a cell that computes a parameter's update from its gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, width), nn.Linear(width, 1)


def _unrolled(steps: int, width: int = 32, size: int = 256) -> Reused:
    def forward(learned: Any, batch: dict[str, Tensor]) -> Tensor:
        theta = batch["theta"]
        zeros = theta.new_zeros(size, width)
        state: Any = (zeros, zeros)
        losses = []
        for _ in range(steps):
            residual = batch["a"] * theta - batch["b"]
            losses.append(residual.square().mean())
            state = learned.cell((residual * batch["a"]).detach()[:, None], state)
            theta = theta + 0.1 * learned.out(state[0])[:, 0].to(theta.dtype)
        return torch.stack(losses).mean()

    batch = {"theta": torch.randn(size), "a": torch.rand(size) + 0.5, "b": torch.randn(size)}
    return Reused(f"optimizer unrolled over {steps} steps", _Learned(width), batch, forward)


class _FixedPoint(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.inject = nn.Linear(width, width), nn.Linear(width, width)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)


def _equilibrium(width: int, steps: int, rows: int = 64) -> Reused:
    def forward(model: Any, batch: dict[str, Tensor]) -> Tensor:
        injected = model.inject(batch["x"])
        z = torch.zeros_like(batch["x"])
        for _ in range(steps):
            z = torch.tanh(model.inner(z) + injected)
        return F.mse_loss(z.to(batch["x"].dtype), batch["target"])

    batch = {"x": torch.randn(rows, width), "target": torch.rand(rows, width) - 0.5}
    return Reused(f"fixed point of width {width}, {steps} steps", _FixedPoint(width), batch, forward)


class _Transducer(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.predictor = nn.GRUCell(width, width)
        self.frames, self.joint, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, vocabulary)


def _transducer(frames: int, width: int = 128, vocabulary: int = 64, rows: int = 4) -> Reused:
    """Return a transducer with teacher forcing: the predictor and the joint network run at every frame."""

    def forward(model: Any, batch: dict[str, Tensor]) -> Tensor:
        state = batch["x"].new_zeros(rows, width)
        losses = []
        for frame, token, label in zip(batch["x"], batch["tokens"], batch["labels"], strict=True):
            state = model.predictor(model.embedding(token), state)
            logits = model.out(torch.tanh(model.frames(frame) + model.joint(state)))
            losses.append(F.cross_entropy(logits.to(batch["x"].dtype), label))
        return torch.stack(losses).mean()

    batch = {
        "x": torch.randn(frames, rows, width),
        "tokens": torch.randint(vocabulary, (frames, rows)),
        "labels": torch.randint(vocabulary, (frames, rows)),
    }
    return Reused(f"transducer, {frames} frames", _Transducer(width, vocabulary), batch, forward)


_CASES: tuple[Callable[[], Reused], ...] = (
    lambda: _linear(256, 12, 128),
    lambda: _linear(1024, 12, 128),
    lambda: _conv(32, 8),
    lambda: _albert(128, 12),
    lambda: _cell("GRUCell", 128, 256, 20),
    lambda: _cell("GRUCell", 64, 128, 200),
    lambda: _cell("GRUCell", 32, 64, 500),
    lambda: _cell("LSTMCell", 128, 256, 20),
    lambda: _cell("RNNCell", 128, 256, 50),
    lambda: _recurrent("GRU", 32, 64, 500),
    lambda: _recurrent("LSTM", 32, 64, 500),
    lambda: _recurrent("RNN", 32, 64, 200),
    lambda: _episode(50),
    lambda: _unrolled(20),
    lambda: _equilibrium(256, 30),
    lambda: _transducer(50),
)


def over_steps(kind: str, steps: int, seed: int = 0) -> Reused:
    """Return a small recurrent net, a cell in a loop or one op, with states near 0.5: every step moves a weight the same way, as a trend
    does, so that a sum over many steps shows what it loses."""
    torch.manual_seed(seed)
    case = (_cell if kind.endswith("Cell") else _recurrent)(kind, 32, 64, steps)
    case.batch["target"].fill_(0.5)
    return case


def cases(seed: int = 0) -> Iterator[Reused]:
    """Return each workload, with weights and a batch of this seed."""
    for make in _CASES:
        torch.manual_seed(seed)
        yield make()
