"""hmp.benchmark(): times, memory, and the result as a table.

No public call makes a step take a given time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.utils.benchmark as torchs
from torch import nn

import hmp
from benchmark_kit import LINEAR, ONCE, nothing
from hmp.tools import benchmark as module
from hmp.tools.benchmark import Benchmark, BenchmarkRow

# -- time, by a clock that only steps move


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "clock", lambda: self.now)
        monkeypatch.setattr(torchs, "Timer", partial(torchs.Timer, timer=lambda: self.now))

    def step(self, seconds: Callable[[], float]) -> Callable[[], None]:
        def step() -> None:
            self.now += seconds()

        return step


def test_medians_spreads_and_ratios_are_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    # seconds of a step in each sample: both policies are prepared twice, then their order alternates; the machine gets slower
    preparing = [9.0, 9.0, 9.0, 9.0]
    plan = iter([*preparing, 1.0, 0.5, 1.0, 2.0, 4.0, 2.0, 4.0, 8.0, 4.0, 1.0, 0.0])
    now = []
    step = Clock(monkeypatch).step(lambda: now[-1])
    result = hmp.benchmark(step, ["float32", LINEAR], reset=lambda: now.append(next(plan)), rounds=5, steps=2)
    assert list(plan) == []
    assert result["float32"].samples == (1.0, 2.0, 4.0, 8.0, 4.0)
    assert result["only linear"].samples == (0.5, 1.0, 2.0, 4.0, 1.0)
    assert result["float32"].seconds == 4.0
    assert result["float32"].spread == 2.0  # from the second to the fourth of five
    assert result["only linear"].seconds == 1.0
    assert (result["float32"].ratio, result["only linear"].ratio) == (1.0, 0.25)  # the table's own times, divided


@pytest.mark.parametrize(("last", "is_noisy"), [(1.1, False), (1.5, True)])
def test_a_spread_above_15_percent_is_called_too_noisy_with_how_to_repeat(
    last: float, is_noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = iter([1.0, 1.0, 1.0, 1.0, last, 0.0])  # twice prepared, three rounds, the end: the spread is half of what the last is longer by
    now: list[float] = []
    result = hmp.benchmark(Clock(monkeypatch).step(lambda: now[-1]), ["float32"], reset=lambda: now.append(next(plan)), rounds=3, steps=1)
    assert result["float32"].noise == pytest.approx((last - 1) / 2)
    assert ("Too noisy: the spread is more than 15% (float32 25%)" in str(result)) is is_noisy
    assert ("hmp benchmark --seconds" in str(result)) is is_noisy


def test_fewer_than_three_rounds_have_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    row = hmp.benchmark(Clock(monkeypatch).step(lambda: 1.0), ["float32"], rounds=2, steps=1)["float32"]
    assert (row.seconds, row.spread, row.noise) == (1.0, None, 0.0)


@pytest.mark.parametrize(
    ("one_step", "seconds", "steps", "rounds"),
    [
        (10.0, 30.0, 1, 3),  # at least three rounds
        (1.0, 31.0, 1, 9),  # 4 steps of preparing, 3 in a sample: 4 + 9 * 3 = 31
        (1.0, 9.0, 1, 3),
        (2.0**-6, 2.0, 13, 8),  # 4 steps of preparing, 15 in a sample: 4 + 8 * 15 = 124 of 128
    ],
)
def test_rounds_go_on_until_the_time_is_spent(
    one_step: float, seconds: float, steps: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = hmp.benchmark(Clock(monkeypatch).step(lambda: one_step), ["float32"], seconds=seconds)
    assert (result.steps, result.untimed_steps, result.rounds) == (steps, 2, rounds)


# -- memory


def squares(model: nn.Linear, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        hidden = model(model(x))  # keeps x, the result between, and the weight for the second one
        (hidden * hidden.view(-1, 8)).sum().backward()  # keeps one storage under two names

    return step


@pytest.mark.native_kernels
def test_saved_bytes_count_a_storage_once_and_no_parameters() -> None:
    model, x = nn.Linear(8, 8, bias=False), torch.rand(4, 8)
    for given in ({"model": model}, {}):
        result = hmp.benchmark(squares(model, x), ["float32", LINEAR], **ONCE, **given)
        assert (result["float32"].memory, result["float32"].weight_bytes) == (3 * 4 * 8 * 4, 0)
        # x, the result between and the hidden one in bfloat16, and the weight's copy of the second call
        assert (result["only linear"].memory, result["only linear"].weight_bytes) == (3 * 4 * 8 * 2 + 8 * 8 * 2, 8 * 8 * 2)
    assert hmp.benchmark(nothing, ["float32"], **ONCE)["float32"].memory == 0


def test_a_step_that_does_not_stand_being_watched_is_timed_all_the_same() -> None:
    weight = torch.rand(3)
    gradient = torch.func.grad(lambda w: (w * w).sum())
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        result = hmp.benchmark(lambda: gradient(weight), ["float32"], **ONCE)
    assert result["float32"].memory is None and result["float32"].weight_bytes is None
    assert result["float32"].samples
    assert "float32: memory could not be measured, RuntimeError: not here" in result.notes


# -- the result


RESULT = Benchmark(
    rows=(
        BenchmarkRow("float32", 0.25, 0.025, 1.0, 3 * 2**20, 0, 1.25, None, (0.25, 0.5)),
        BenchmarkRow("torch.autocast", error="ValueError: no"),
        BenchmarkRow("habana", 12.5e-6, None, 0.5, 576, 64, math.nan, None, (12.5e-6,)),
    ),
    baseline="float32", rounds=1, untimed_steps=1, steps=20, seed=0, losses_compare=True,
    device="cpu", torch="2.13.0", threads=2, notes=("A note.",),
)  # fmt: skip


def test_the_table_has_the_numbers() -> None:
    assert str(RESULT) == repr(RESULT)
    lines = {line.split()[0]: line.split() for line in str(RESULT).splitlines() if line}
    assert " ".join(lines["policy"]) == "policy step time spread vs float32 activations kept weight copies kept loss, step 21"
    assert lines["float32"] == "float32 250 ms 10.0% 1.00 3.0 MiB 0 B 1.25".split()
    assert lines["habana"] == "habana 12.5 us - 0.50 512 B 64 B nan".split()
    assert lines["torch.autocast:"][1] == "ValueError:" and lines["A"] == ["A", "note."]
