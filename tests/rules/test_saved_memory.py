"""What is left in memory: each memory packed once, views with it, and nothing beside what is held anyway."""

from __future__ import annotations

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


def three_products(x: Tensor) -> Any:
    return [F.linear(x, weight) for weight in WEIGHTS]


def chunks(x: Tensor) -> Any:
    return [F.gelu(part) for part in (x * 3).add(0).chunk(4, 1)]


def one_row_of_many(x: Tensor) -> Any:
    return F.gelu((x + 1).view(8, 32, WIDTH)[:, :10])


def held(x: Tensor) -> Any:
    y = x + 1
    return F.gelu(y), y


def expanded(x: Tensor) -> Any:
    return x[:64].add(1).unsqueeze(0).expand(4, -1, -1) * 1.5 + F.gelu(x[:64].add(1).unsqueeze(0).expand(4, -1, -1))


LEFT: list[tuple[Callable[[Tensor], Any], int, int]] = [
    (lambda x: three_products(x + 1), FLOATS, ROWS),  # once, not three times
    (chunks, FLOATS, 4 * ROWS),  # four views of one memory, and of the mul nothing: a number is no tensor
    (lambda x: F.gelu(input=x + 1), FLOATS, ROWS),
    (one_row_of_many, 8 * 10 * WIDTH, 8 * 10),  # the view alone, not its base
    (held, 0, 0),  # the caller has it
    (lambda x: F.gelu((x + 1).t()), FLOATS, 2 * WIDTH),  # its own rows, which are of 256
    (lambda x: F.relu(x + 1), 0, 0),  # its result, which the caller has
    (lambda x: F.relu(x + 1) + 1, FLOATS // 8, 0),  # a bit each
    (lambda x: F.linear(F.relu(x + 1), WEIGHTS[0]), FLOATS, ROWS),  # the numbers once, which tell their signs
    (expanded, 64 * WIDTH, 64),  # once what stands there four times
]


def test_r22_what_is_left_is_a_byte_for_each_number_and_block_once() -> None:
    with only_what_is_new() as known, hmp.casts(PACKED):
        for at, (forward, numbers, blocks) in enumerate(LEFT):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            F.gelu(x + 1), F.gelu(torch.ones(8))  # a thread's first packing gets memory that is used again
            held: list[Any] = []

            def run(forward: Any = forward, x: Tensor = x, held: list[Any] = held) -> Any:
                held.append(forward(x))
                F.gelu(torch.ones(8))  # looks for memory that nothing else holds
                return held[0]

            kept, result = bytes_of(run, known)
            assert kept == numbers + blocks, at
            torch.autograd.backward([each.sum() for each in (result if isinstance(result, (list, tuple)) else [result])])
            assert x.grad is not None and bool(x.grad.isfinite().all())


def test_r22_a_graph_that_is_used_again_keeps_the_pack_and_not_its_numbers() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def run() -> Tensor:
        result = F.gelu(x + 1)
        F.gelu(torch.ones(8))
        torch.autograd.grad(result.sum(), x, retain_graph=True)
        return result

    with hmp.casts(PACKED):
        assert bytes_of(run)[0] == FLOATS + ROWS


def test_r22_of_a_weights_low_precision_copy_nothing_is_kept_and_backward_has_its_bits() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, 2 * WIDTH, bias=False), torch.randn(ROWS, WIDTH, requires_grad=True)
    policy = PACKED.replace(bf16={"linear"})
    with hmp.casts(policy):
        kept, result = bytes_of(lambda: (layer(x.relu() + 1), F.gelu(torch.ones(8)))[0])
    assert kept <= FLOATS * 33 // 32 + FLOATS * 4  # the product's input; relu's result is not packed while `+` is to be computed
    (found,) = torch.autograd.grad(result.float().sum(), x)
    low = layer.weight.detach().to(torch.bfloat16)
    expected = torch.ones(ROWS, 2 * WIDTH, dtype=torch.bfloat16) @ low
    assert torch.equal(found, expected.float() * (x > 0))


def test_r22_benchmark_and_summary_count_what_is_left() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH)
    whole, packed = (hmp.summary(hmp.apply(model, policy), x).saved_bytes for policy in (PACKED.replace(saved=frozenset()), PACKED))
    assert whole == 3 * FLOATS * 4 and packed < whole * 0.8  # the batch is held, and the last input until its model returns
    kept, _ = bytes_of(lambda: (model(x), F.gelu(torch.ones(8)))[0])
    assert kept <= 2 * FLOATS * 33 // 32 + FLOATS * 4


@pytest.mark.parametrize("listed", ["tanh", "gelu"])
def test_r22_memory_that_an_unlisted_op_keeps_too_is_counted_once(listed: str) -> None:
    """The product keeps what tanh gives and gelu takes: behind the one, before the other."""
    x, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)

    def forward() -> Any:
        hidden = torch.tanh(x)
        return F.linear(hidden, weight), F.gelu(hidden)

    with hmp.casts(hmp.Policy("packed", saved={listed})):
        kept, _ = bytes_of(forward)
    assert kept == 4 * FLOATS
