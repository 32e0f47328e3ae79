"""hmp.benchmark(): which steps run in which order, under which casts and from which state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from benchmark_kit import LINEAR, ONCE, Training

BF16, FP32 = torch.bfloat16, torch.float32
BOTH = hmp.Policy("both", bf16={"linear", "mul"})

# -- what runs, and under what


def seen() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of a product that all the lists hold, and of one that one list alone holds."""
    x = torch.ones(2, 2)
    return F.linear(x, x).dtype, (x * x).dtype


def test_rounds_take_every_policy_once_in_an_order_that_rotates() -> None:
    names = {(FP32, FP32): "float32", (BF16, FP32): "torch.autocast", (BF16, BF16): "both"}
    ran: list[str] = []
    result = hmp.benchmark(lambda: ran.append(names[seen()]), ["float32", "torch.autocast", BOTH], rounds=3, steps=2)
    f, a, h = (4 * [name] for name in ("float32", "torch.autocast", "both"))  # two untimed steps, two timed ones
    assert ran[-36:] == [*f, *a, *h, *a, *h, *f, *h, *f, *a]
    preparing = ran[:-36]
    assert preparing == sorted(preparing, key=["float32", "torch.autocast", "both"].index)
    assert [row.name for row in result] == ["float32", "torch.autocast", "both"]
    assert [len(row.samples) for row in result] == [3, 3, 3]
    assert (result.rounds, result.untimed_steps, result.steps) == (3, 2, 2)


def test_rows_without_hmp_run_on_torch_itself(torch_differences: Callable[[], list[str]]) -> None:
    rows: set[str] = set()

    def step() -> None:
        name = "torch.autocast" if torch._C._is_any_autocast_enabled() else "mine" if hmp.casts_enabled() else "float32"
        if name not in rows:
            rows.add(name)
            assert (torch_differences() == []) is (name != "mine")

    hmp.benchmark(step, ["float32", "torch.autocast", LINEAR], **ONCE)
    assert rows == {"float32", "torch.autocast", "mine"}


def test_a_policy_is_in_force_in_backward_and_not_in_the_optimizer() -> None:
    training, dtypes = Training(), set()
    training.one.weight.register_hook(lambda gradient: dtypes.add((gradient.dtype, seen())))
    training.optimizer.register_step_pre_hook(lambda *_: dtypes.add(seen()))
    training.benchmark([LINEAR], **ONCE)
    assert dtypes == {(FP32, (FP32, FP32)), (FP32, FP32)}


def test_a_conversion_made_before_is_in_force_again_and_said() -> None:
    found: list[Any] = []
    with hmp.convert(policy=LINEAR) as handle:
        before = hmp.fallbacks()
        result = hmp.benchmark(lambda: found.append(seen()), ["float32", BOTH], **ONCE)
        assert seen() == (BF16, FP32)
        assert "Call hmp.revert() first" in str(result)
        assert hmp.fallbacks() == before
        handle.revert()
        assert not hmp.is_converted()
    assert set(found) == {(FP32, FP32), (BF16, BF16)}


# -- the same state for everybody


def plain_losses(training: Training, steps: int, seed: int, around: Callable[[], Any]) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        with around():
            losses.append(training().item())
    return losses


def test_losses_are_those_of_plain_loops_from_the_same_state_and_seed() -> None:
    result = Training().benchmark(["float32", "torch.autocast", LINEAR], rounds=1, steps=4, seed=7)
    with_hand_casts = Training()
    with_hand_casts.linear = lambda x, weight, bias: F.linear(x.to(BF16), weight.to(BF16), bias.to(BF16))
    for name, training, around in (
        ("float32", Training(), torch.enable_grad),
        ("torch.autocast", Training(), lambda: torch.autocast("cpu", dtype=BF16)),
        ("only linear", with_hand_casts, torch.enable_grad),
    ):
        expected = plain_losses(training, 6, 7, around)
        assert result[name].loss == expected[-1], name
    assert result["only linear"].loss != result["float32"].loss
    assert result.losses_compare


def test_state_seeds_and_gradients_are_as_they_were() -> None:
    training = Training()
    training.benchmark(["float32"], **ONCE)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert training.optimizer.state_dict()["state"] == {}
    training()
    before = training.everything()
    random.seed(3)
    torch.manual_seed(3)
    training.benchmark(["float32", LINEAR], **ONCE)
    torch.testing.assert_close(training.everything(), before, rtol=0, atol=0)
    drawn = random.random(), torch.rand(()).item()
    random.seed(3)
    torch.manual_seed(3)
    assert drawn == (random.random(), torch.rand(()).item())


def test_every_policy_draws_the_same_random_numbers() -> None:
    numpy = pytest.importorskip("numpy")

    def step() -> float:
        return torch.rand(()).item() + random.random() + numpy.random.rand()

    result = hmp.benchmark(step, ["float32", "torch.autocast"], rounds=2, steps=3)
    assert len({row.loss for row in result}) == 1


def test_other_state_and_reset_are_put_back_before_each_sample() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batches: list[float] = []

    def step() -> float:
        optimizer.step()
        scheduler.step()
        return batches.pop() + scheduler.last_epoch

    reset = lambda: batches.__setitem__(slice(None), [5.0] * 99)  # noqa: E731
    result = hmp.benchmark(step, ["float32", "torch.autocast"], optimizer=optimizer, state=scheduler, reset=reset, **ONCE)
    # of the third step: two are not timed
    assert [row.loss for row in result] == 2 * [8.0]
    assert scheduler.last_epoch == 0
    assert len(batches) == 99


def test_losses_are_compared_where_all_state_was_given_alone() -> None:
    result = hmp.benchmark(lambda: 1.0, ["float32"], **ONCE)
    assert not result.losses_compare and "The losses can't be compared" in str(result)
    training = Training()
    result = hmp.benchmark(training, ["float32"], optimizer=training.optimizer, rounds=3, steps=5)
    assert any("Pass all state" in note for note in result.notes)
