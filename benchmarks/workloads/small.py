"""Small models and a step of each: blocks of attention, linear layers, convolutions, recurrent nets, of any width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hmp.tools.saved_activations import saved_by

from ..harness.sides import Side, rotated
from ..harness.timing import OWN, step_seconds, steps_for

Make = Callable[[], tuple[nn.Module, Tensor]]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _ByHand(nn.Module):
    """A block as encoders write it: a look-up, dropout, scores, softmax, a residual and a norm, each op by itself."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.embedding, self.dropout, self.norm = nn.Embedding(1000, width), nn.Dropout(0.1), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("ids", torch.arange(tokens))

    def forward(self, positions: Tensor) -> Tensor:
        x = self.dropout(self.embedding(self.ids) + positions)
        q, k, v = (to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.query, self.key, self.value))
        scores = torch.softmax(q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5), -1)
        return self.norm(x + self.dropout(self.out((self.dropout(scores) @ v).transpose(1, 2).flatten(2))))


class _First(nn.Module):
    """The output sequence of a recurrent net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


class _Steps(nn.Module):
    """A cell that is called for one step of a sequence after the other."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for step in x:
            state = self.cell(step, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found)


def attention(width: int, blocks: int = 2, batch: tuple[int, int] = (8, 64)) -> tuple[nn.Module, Tensor]:
    """Return blocks of a transformer, and so many sequences of so many tokens."""
    return nn.Sequential(*(_Attention(width) for _ in range(blocks))), torch.randn(*batch, width)


def by_hand(width: int, batch: tuple[int, int] = (2, 16)) -> tuple[nn.Module, Tensor]:
    """Return an encoder's block in evaluation, and the positions of so many sequences of so many tokens."""
    return _ByHand(width, 4, batch[1]).eval(), torch.randn(*batch, width)


def mlp(width: int, layers: int = 6, batch: int = 256) -> tuple[nn.Module, Tensor]:
    """Return linear layers with a ReLU after each, and a batch."""
    return nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU()))), torch.randn(batch, width)


def convolutions(channels: int, batch: int = 8, size: int = 16) -> tuple[nn.Module, Tensor]:
    """Return four convolutions, each with a BatchNorm and a ReLU, and a batch of squares."""
    block = (lambda: nn.Conv2d(channels, channels, 3, padding=1), lambda: nn.BatchNorm2d(channels), nn.ReLU)
    return nn.Sequential(*(make() for _ in range(4) for make in block)), torch.randn(batch, channels, size, size)


def recurrent(kind: str, width: int) -> tuple[nn.Module, Tensor]:
    """Return nn.LSTM or nn.GRU, and 32 steps of 16 sequences."""
    return _First(getattr(nn, kind)(width, width)), torch.randn(32, 16, width)


def cells(kind: str, width: int) -> tuple[nn.Module, Tensor]:
    """Return nn.LSTMCell or nn.GRUCell, called for each of 32 steps of 16 sequences."""
    return _Steps(getattr(nn, kind)(width, width)), torch.randn(32, 16, width)


class Task:
    """A model with its batch."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model, self.batch = make()
        self.weights = torch.randn_like(self.batch)

    def loss(self) -> Tensor:
        """Return the loss of a forward pass."""
        return (self.model(self.batch).float() * self.weights).mean()

    def train(self, side: Side) -> None:
        """Run a training step."""
        side.run(self.loss).backward()
        with torch.no_grad():  # in place, as an optimizer writes: the next step's copies are new ones
            torch._foreach_mul_(list(self.model.parameters()), 1.0)
        self.model.zero_grad(set_to_none=True)

    def infer(self, side: Side) -> None:
        """Run a forward pass without gradients."""
        with torch.no_grad():
            side.run(lambda: self.model(self.batch))

    def gradients(self, side: Side) -> Tensor:
        """Return all gradients, in one vector of float64."""
        with side.visit():
            side.run(self.loss).backward()
        found = torch.cat([p.grad.double().flatten() for p in self.model.parameters() if p.grad is not None])
        self.model.zero_grad(set_to_none=True)
        return found

    def kept(self, side: Side) -> int:
        """Return the bytes that a forward pass saves for backward."""
        with side.visit():
            self.train(side)
            return saved_by(lambda: side.run(self.loss), [*self.model.parameters(), *self.model.buffers()])


def seconds_of(step: Callable[[Side], None], among: dict[str, Side], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the processor seconds of a step by side, the sides in turns."""
    samples: dict[str, list[float]] = {name: [] for name in among}
    steps = {}
    for number in range(rounds):
        for name in rotated(list(among), number):
            side = among[name]
            with side.visit():
                run = partial(step, side)
                run()
                steps[name] = steps.get(name) or steps_for(seconds, run, "cpu", 3)
                samples[name].append(step_seconds(run, steps[name], "cpu", OWN))
    return samples
