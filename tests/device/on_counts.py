"""How many weights are cast: no more than under torch.autocast in one region of the same length, whatever the device.

Counted as the profiler sees them: casts to bfloat16 of tensors with the shape of a parameter. No activation here has such a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hmp
from device_kit import BF16, DEVICE, preset, tensor

WIDTH = 96
NUMBER_OF_BF16 = 15  # as torch's dispatcher has the dtype


def _sequential() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(4)))


class _Decoder(nn.Module):
    """One block of a decoder: its next token depends on all before."""

    def __init__(self, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH, device=DEVICE)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(4))
        self.head = nn.Linear(WIDTH, vocabulary, device=DEVICE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        h = h + self.out(F.scaled_dot_product_attention(self.q(h)[None], self.k(h)[None], self.v(h)[None])[0])
        return self.head(h)[-1]


@torch.no_grad()
def _ten_calls(model: Any) -> None:
    for number in range(10):
        model(tensor(8, WIDTH, seed=number))


@torch.no_grad()
def _generate(model: Any) -> None:
    tokens = torch.tensor([1, 2, 3], device=DEVICE)
    for _ in range(32):
        tokens = torch.cat([tokens, model(tokens).float().argmax()[None]])


def _cells(model: Any) -> None:
    state: Any = tensor(8, WIDTH)
    state = (state, state) if isinstance(model, nn.LSTMCell) else state
    for number in range(20):
        state = model(tensor(8, WIDTH, seed=number), state)
    (state[0] if isinstance(state, tuple) else state).float().square().mean().backward()


def _shared_layer(model: Any) -> None:
    h = tensor(8, WIDTH)
    for _ in range(12):
        h = torch.tanh(model(h))
    h.float().square().mean().backward()


def _micro_batches(model: Any) -> None:
    for number in range(4):
        model(tensor(8, WIDTH, seed=number)).float().square().mean().backward()


WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "ten calls of four layers": (_sequential, _ten_calls),
    "generation of 32 tokens": (_Decoder, _generate),
    "GRUCell over 20 steps": (lambda: nn.GRUCell(WIDTH, WIDTH, device=DEVICE), _cells),
    "LSTMCell over 20 steps": (lambda: nn.LSTMCell(WIDTH, WIDTH, device=DEVICE), _cells),
    "a layer used 12 times": (lambda: nn.Linear(WIDTH, WIDTH, device=DEVICE), _shared_layer),
    "four micro-batches": (_sequential, _micro_batches),
}


def casts_of_weights(model: nn.Module, run: Callable[[Any], None], region: Callable[[], Any]) -> int:
    """In the second of two steps, between which the weights are written."""
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
                parameter.grad = None
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled, region():
            run(model)
    # XLA shows some casts as one in another
    events = [e for e in profiled.events() if e.name == "aten::_to_copy" and (e.cpu_parent is None or e.cpu_parent.name != e.name)]
    # a move to another device says which, and a cast does not
    return sum(tuple(e.input_shapes[0]) in shapes and e.concrete_inputs[1:3] == [NUMBER_OF_BF16, None] for e in events)


def test_no_weight_is_cast_more_often_than_under_torch_autocast() -> None:
    said, more = [], []
    policy = hmp.Policy.load(preset()).replace(dtype=BF16)
    for name, (make, run) in WORKLOADS.items():
        torch.manual_seed(0)
        theirs = casts_of_weights(make(), run, lambda: torch.autocast(DEVICE, dtype=BF16))
        torch.manual_seed(0)
        ours = casts_of_weights(make(), run, lambda: hmp.casts(policy))
        said.append(f"{name}: {ours} ({theirs})")
        if ours > theirs:
            more.append(said[-1])
        assert theirs > 0, f"{name}: the profiler saw no cast"
    assert not more, "; ".join(more)
    print("hmp (torch.autocast): " + ", ".join(said))
