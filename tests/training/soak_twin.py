"""The model of the soak test in plain torch, in a process that knows nothing of hmp: every cast is written out."""

from __future__ import annotations

import array
import copy
import zlib
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, OUT, ROWS = 64, 136, 8, 4  # the first weight is large enough for its casts to be shared


class CompiledPolicy(NamedTuple):
    """What a policy does with the model's ops: the dtype that each computes in, None where that is its input's."""

    linear: torch.dtype | None = None
    relu: torch.dtype | None = None
    mul: torch.dtype | None = None


class Net(nn.Module):
    """Two products, a function of torch's, an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) * 0.5)


def to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def explicit(net: Net, x: Tensor, casts: CompiledPolicy) -> Tensor:
    """What `net` gives under these casts."""
    up, down, dtype = net.up, net.down, casts.linear
    h = F.linear(to(x, dtype), to(up.weight, dtype), to(up.bias, dtype))
    h = to(torch.relu(to(h, casts.relu)), casts.mul) * 0.5
    return F.linear(to(h, dtype), to(down.weight, dtype), to(down.bias, dtype))


def fresh(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    if kind == "sgd":
        return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if kind == "radam":
        return net, torch.optim.RAdam(net.parameters(), lr=0.01, foreach=False)  # in Python, by `*` and `/`
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, OUT, generator=generator)


def digest(net: nn.Module) -> int:
    """A checksum of the bits of all weights. No numpy: hmp would then know that somebody else may write them."""
    found = 0
    for p in net.parameters():
        found = zlib.crc32(array.array("f", [x for row in p.detach().view(1, -1).tolist() for x in row]), found)
    return found


class Twin:
    """What the other process does when it is told to."""

    def reset(self, kind: str) -> int:
        self.net, self.optimizer = fresh(kind)
        self.kept = self._state()
        return digest(self.net)

    def _state(self) -> Any:
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))

    def train(self, casts: CompiledPolicy, first: int, steps: int, micro: int) -> tuple[list[float], int]:
        losses = []
        for step in range(first, first + steps):
            for part in range(micro):
                x, y = batch(10 * step + part)
                loss = F.mse_loss(explicit(self.net, x, casts).float(), y)
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses, digest(self.net)

    def infer(self, casts: CompiledPolicy, step: int) -> tuple[str, list[list[float]]]:
        with torch.no_grad():
            y = explicit(self.net, batch(step)[0], casts)
        return str(y.dtype), y.tolist()

    def save(self) -> None:
        self.kept = self._state()

    def load(self) -> int:
        net, optimizer = copy.deepcopy(self.kept)
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)
        return digest(self.net)


def serve(connection: Connection) -> None:
    """Does what it is told, until it is told None."""
    torch.set_num_threads(1)
    twin = Twin()
    while (told := connection.recv()) is not None:
        name, *arguments = told
        connection.send(getattr(twin, name)(*arguments))
