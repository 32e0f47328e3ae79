"""Many policies may be tried in one process: what each of them needed goes with it."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

X = torch.ones(2, 2)
OPS = ("linear", "relu", "softmax", "mul", "add", "gelu", "tanh", "sigmoid", "sum", "mean", "exp")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


def kilobytes() -> float:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1024


def tries(numbers: range, model: torch.nn.Module) -> None:
    """One policy of many after another, for the process, and with a line of a module's own for a model."""
    for number in numbers:
        listed = {op for bit, op in enumerate(OPS) if number >> bit & 1}
        tried = policy(bf16=listed, fp32=set(OPS) - listed, name=f"try {number}")
        with hmp.convert(policy=tried):
            assert F.linear(X, X).dtype == (torch.bfloat16 if number & 1 else torch.float32)
        if number % 4 == 0:
            tried = tried.replace(fp32=tried.fp32 | {"linear @ other"}, bf16=tried.bf16 - {"linear @ other"})
            with hmp.convert(policy=tried, model=model):
                assert model(X)[1].dtype == torch.float32
            hmp.remove(hmp.apply(model, tried))


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [100, pytest.param(300, marks=pytest.mark.nightly)])
def test_memory_is_flat_over_conversions_inside_a_conversion(numbers: int) -> None:
    model = Net()
    tracemalloc.start()
    try:
        with hmp.convert(policy=policy(bf16=["linear"])):
            tries(range(60), model)
            size = kilobytes()
            tries(range(60, numbers), model)
            assert kilobytes() < size + 3000  # the casts of one policy take a thousand
            assert F.linear(X, X).dtype == torch.bfloat16
    finally:
        tracemalloc.stop()
