"""What is left in memory: each memory packed once, and views of it with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from saved_oracle import bytes_of, only_what_is_new, packs

pytestmark = packs

Tensor = torch.Tensor
PACKED = hmp.Policy("packed", saved=frozenset({"linear", "gelu", "mul", "relu", "softmax"}))
ROWS, WIDTH = 256, 64
FLOATS = ROWS * WIDTH
WEIGHTS = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
WIDE = torch.randn(8, 2 * WIDTH, requires_grad=True)


def three_products(x: Tensor) -> Any:
    return [F.linear(x, weight) for weight in WEIGHTS]


def chunks(x: Tensor) -> Any:
    return [F.gelu(part) for part in (x * 3).add(0).chunk(4, 1)]


def one_row_of_many(x: Tensor) -> Any:
    return F.gelu((x + 1).view(8, 32, WIDTH)[:, :10])


def held(x: Tensor) -> Any:
    y = x + 1
    return F.gelu(y), y


def written_between(x: Tensor) -> Any:
    y = x + 1
    first = F.gelu(y)
    return first, F.gelu(y.add_(1))


def pieces_after_the_whole(x: Tensor) -> Any:
    y = x + 1
    return F.gelu(y), F.gelu(y[:128]), F.gelu(y[:, :32]), F.linear(y.view(-1, 2 * WIDTH), WIDE)


def expanded(x: Tensor) -> Any:
    return x[:64].add(1).unsqueeze(0).expand(4, -1, -1) * 1.5 + F.gelu(x[:64].add(1).unsqueeze(0).expand(4, -1, -1))


LEFT: list[tuple[Callable[[Tensor], Any], int, int]] = [
    (lambda x: three_products(x + 1), FLOATS, ROWS),  # once, not three times
    (chunks, FLOATS, 4 * ROWS),  # four views of one memory, and of the mul nothing: a number is no tensor
    (lambda x: F.gelu(input=x + 1), FLOATS, ROWS),
    (one_row_of_many, 8 * 10 * WIDTH, 8 * 10),  # the view alone, not its base
    (held, FLOATS, ROWS),  # the caller's is the caller's
    (written_between, 2 * FLOATS, 2 * ROWS),
    (pieces_after_the_whole, FLOATS, 2 * ROWS),  # blocks of 32, of which a column's piece has its own
    (lambda x: F.gelu((x + 1).t()), FLOATS, 2 * WIDTH),  # its own rows, which are of 256
    (lambda x: F.relu(x + 1), FLOATS // 8, 0),  # a bit each
    (lambda x: F.linear(F.relu(x + 1), WEIGHTS[0]), FLOATS, ROWS),  # the numbers once, which tell their signs
    (expanded, 64 * WIDTH, 64),  # once what stands there four times
]


def test_r22_what_is_left_is_a_byte_for_each_number_and_block_once() -> None:
    with only_what_is_new() as known, hmp.casts(PACKED):
        for at, (forward, numbers, blocks) in enumerate(LEFT):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            F.gelu(x + 1)  # a thread's first packing gets memory that is used again
            kept, result = bytes_of(functools.partial(forward, x), known)
            assert kept == numbers + blocks, at
            torch.autograd.backward([each.sum() for each in (result if isinstance(result, (list, tuple)) else [result])])
            assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.native_kernels  # computed in float32, the op saves a copy of the weight
def test_r22_of_a_weights_low_precision_copy_nothing_is_kept_and_backward_has_its_bits() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, 2 * WIDTH, bias=False), torch.randn(ROWS, WIDTH, requires_grad=True)
    policy = PACKED.replace(bf16={"linear"})
    with hmp.casts(policy):
        kept, result = bytes_of(lambda: layer(x.relu() + 1))
    assert kept == FLOATS + ROWS + FLOATS // 8  # the product's input and relu's signs
    (found,) = torch.autograd.grad(result.float().sum(), x)
    low = layer.weight.detach().to(torch.bfloat16)
    expected = torch.ones(ROWS, 2 * WIDTH, dtype=torch.bfloat16) @ low
    assert torch.equal(found, expected.float() * (x > 0))


@pytest.mark.native_kernels  # computed in float32, the op saves a copy of the weight
def test_r22_of_a_batch_nothing_is_packed_but_its_low_precision_copy() -> None:
    batch, layer = torch.randn(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
    with hmp.casts(PACKED):
        assert bytes_of(lambda: layer(batch))[0] == 0
    with hmp.casts(PACKED.replace(bf16={"linear"})):
        assert bytes_of(lambda: layer(batch))[0] == FLOATS + ROWS


def test_r22_benchmark_and_summary_count_what_is_left() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH)
    whole, packed = (hmp.summary(hmp.apply(model, policy), x).saved_bytes for policy in (PACKED.replace(saved=frozenset()), PACKED))
    assert whole == 3 * FLOATS * 4 and packed == FLOATS * 4 + 2 * (FLOATS + ROWS)  # the batch as it is
    assert bytes_of(lambda: model(x))[0] == 2 * (FLOATS + ROWS)


@pytest.mark.parametrize("listed", ["tanh", "gelu"])
def test_r22_what_an_unlisted_op_saves_too_stays_beside_the_pack(listed: str) -> None:
    """The product saves what tanh gives and gelu takes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(x)
            return F.linear(hidden, self.weight), F.gelu(hidden)

    model, x = Net(), torch.randn(ROWS, WIDTH, requires_grad=True)
    hmp.apply(model, hmp.Policy("packed", saved={listed}))
    assert bytes_of(lambda: model(x))[0] == hmp.summary(model, x).saved_bytes == 4 * FLOATS + FLOATS + ROWS
