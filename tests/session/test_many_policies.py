"""Thousands of policies may be tried in one process: what each of them needed goes with it."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.context.state import CompiledPolicy
from hmp.session import compiled_policies
from thread_kit import in_thread
from trap_kit import policy

X = torch.ones(2, 2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


OPS = ("linear", "relu", "softmax", "mul", "add", "gelu", "tanh", "sigmoid", "sum", "mean", "exp")


def the(number: int) -> hmp.Policy:
    """One policy of many."""
    listed = {op for bit, op in enumerate(OPS) if number >> bit & 1}
    return policy(bf16=listed, fp32=set(OPS) - listed, name=f"try {number}")


def alive() -> int:
    gc.collect()
    return sum(type(each) is CompiledPolicy for each in gc.get_objects())


def kilobytes() -> float:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1024


def tries(numbers: range, model: torch.nn.Module | None = None) -> None:
    for number in numbers:
        tried = the(number)
        if model is None:
            with hmp.convert(policy=tried):
                wanted = torch.bfloat16 if number & 1 else torch.float32
                assert F.linear(X, X).dtype == wanted
        else:
            tried = tried.replace(fp32=tried.fp32 | {"linear @ other"}, bf16=tried.bf16 - {"linear @ other"})
            with hmp.convert(policy=tried, model=model):
                assert model(X)[1].dtype == torch.float32
            hmp.remove(hmp.apply(model, tried))


def assert_flat(numbers: int, model: torch.nn.Module | None = None) -> None:
    tracemalloc.start()
    try:
        with hmp.convert(policy=policy(bf16=["linear"])):
            tries(range(60), model)
            count, size = alive(), kilobytes()
            assert count < 3 * compiled_policies.MOST
            tries(range(60, numbers), model)
            assert alive() <= count + 2
            assert kilobytes() < size + 3000  # the casts of one policy take a thousand
            assert F.linear(X, X).dtype == torch.bfloat16
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [100, pytest.param(300, marks=pytest.mark.nightly)])
def test_memory_is_flat_over_conversions_inside_a_conversion(numbers: int):
    assert_flat(numbers)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("numbers", [90, pytest.param(300, marks=pytest.mark.nightly)])
def test_memory_is_flat_over_policies_with_scoped_lines(numbers: int):
    assert_flat(numbers, Net())


@pytest.mark.slow
def test_what_is_in_use_is_kept_and_revert_puts_all_of_it_out_of_force():
    used = policy(bf16=["linear"], name="used")
    model, region = hmp.apply(torch.nn.Linear(2, 2), used), hmp.casts(policy(bf16=["matmul"]))
    handle = hmp.convert(policy=policy(bf16=["mul"]))
    with region:
        in_thread(tries, range(2 * compiled_policies.MOST))
        assert (X @ X).dtype == torch.bfloat16
        assert model(X).dtype == torch.bfloat16
        hmp.revert()
        assert (X @ X).dtype == (X * X).dtype == model(X).dtype == torch.float32
    handle.revert()
    assert alive() <= 3  # the process's, and two that this test holds by its regions


@pytest.mark.slow
def test_the_latest_policies_are_kept_though_nothing_uses_them():
    hmp.convert(policy=policy(bf16=["linear"]))
    with hmp.casts(the(0)):
        pass
    kept = weakref.ref(compiled_policies.compile_policy(the(0)))
    tries(range(1, compiled_policies.MOST - 2))
    gc.collect()
    assert kept() is compiled_policies.compile_policy(the(0))
    tries(range(1, 2 * compiled_policies.MOST))
    gc.collect()
    assert kept() is None
    with hmp.casts(the(1)):
        assert F.linear(X, X).dtype == torch.bfloat16


@pytest.mark.slow
def test_verbose_conversions_forget_what_they_said_with_their_policy(caplog, monkeypatch):
    caplog.set_level("INFO", "hmp")
    monkeypatch.setattr(sys.modules["hmp.session.conversion"], "tell_unreachable", lambda: None)  # goes through all modules, each time
    with hmp.convert(policy=policy(bf16=["linear"])):
        for number in range(compiled_policies.MOST * 2):
            with hmp.convert(policy=the(number), verbose=True):
                F.linear(X, X)
        gc.collect()
        assert len(compiled_policies._log_observers) <= compiled_policies.MOST
