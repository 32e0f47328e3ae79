"""hmp.benchmark(): times, memory, and the result as a table.

No public call makes a step take a given time, or asks a device's allocator where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hmp
from benchmark_kit import LINEAR, ONCE, nothing
from hmp.tools.benchmark import sampling
from hmp.tools.benchmark.result import Benchmark, BenchmarkRow

# -- time, by a clock that only steps move


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(sampling, "clock", lambda: self.now)

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
    assert result["only linear"].ratio == 0.5  # of the rounds, not of the medians
    assert result["float32"].ratio == 1.0


def test_fewer_than_three_rounds_have_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    row = hmp.benchmark(Clock(monkeypatch).step(lambda: 1.0), ["float32"], rounds=2, steps=1)["float32"]
    assert (row.seconds, row.spread) == (1.0, None)


@pytest.mark.parametrize(
    ("one_step", "seconds", "steps", "rounds"),
    [
        (10.0, 30.0, 1, 3),  # at least three rounds
        (1.0, 30.0, 1, 13),  # 4 steps of preparing, 2 in a sample: 4 + 13 * 2 = 30
        (1.0, 9.0, 1, 3),
        (2.0**-6, 2.0, 13, 8),  # 1 + 1 + 2 + 4 until the clock can be read, 3 watched, 14 in a sample: 11 + 8 * 14 < 128
    ],
)
def test_rounds_go_on_until_the_time_is_spent(
    one_step: float, seconds: float, steps: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = hmp.benchmark(Clock(monkeypatch).step(lambda: one_step), ["float32"], seconds=seconds)
    assert (result.steps, result.rounds) == (steps, rounds)


# -- memory


def squares(model: nn.Linear, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        hidden = model(model(x))  # keeps x, the result between, and the weight for the second one
        (hidden * hidden.view(-1, 8)).sum().backward()  # keeps one storage under two names

    return step


def test_saved_bytes_count_a_storage_once_and_no_parameters() -> None:
    model, x = nn.Linear(8, 8, bias=False), torch.rand(4, 8)
    for given in ({"model": model}, {}):
        result = hmp.benchmark(squares(model, x), ["float32", LINEAR], **ONCE, **given)
        assert result.memory_kind == "saved for backward"
        assert result["float32"].memory == 3 * 4 * 8 * 4
        # x, the result between and the hidden one in bfloat16, and the weight's copy of the second call
        assert result["only linear"].memory == 3 * 4 * 8 * 2 + 8 * 8 * 2
    assert hmp.benchmark(nothing, ["float32"], **ONCE)["float32"].memory == 0


def test_a_step_that_does_not_stand_being_watched_is_timed_all_the_same() -> None:
    weight = torch.rand(3)
    gradient = torch.func.grad(lambda w: (w * w).sum())
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        result = hmp.benchmark(lambda: gradient(weight), ["float32"], **ONCE)
    assert result["float32"].memory is None
    assert result["float32"].samples
    assert "float32: memory could not be measured, RuntimeError: not here" in result.notes


def test_an_accelerators_memory_is_its_allocators_peak_without_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        reset_peak_memory_stats=lambda device: calls.append(("reset", device)),
        max_memory_allocated=lambda device: 1000,
        memory_allocated=lambda device: 600,
    )
    monkeypatch.setattr(torch, "fake", fake, raising=False)
    device: Any = SimpleNamespace(type="fake")
    kind, measure = sampling.meter(device, [], copies=300)
    assert kind == "peak memory"
    assert measure(lambda: calls.append("step")) == 700
    assert calls == [("reset", device), "step"]
    assert sampling.allocated(device) == 600
    assert sampling.allocated(torch.device("cpu")) == 0


# -- the result


RESULT = Benchmark(
    rows=(
        BenchmarkRow("float32", 0.25, 0.025, 1.0, 3 * 2**20, 2.0, 1.25, None, (0.25, 0.5)),
        BenchmarkRow("torch.autocast", error="ValueError: no"),
        BenchmarkRow("habana", 12.5e-6, None, 0.5, 512, 2.0, math.nan, None, (12.5e-6,)),
    ),
    baseline="float32", rounds=1, untimed_steps=1, steps=20, seed=0, losses_compare=True,
    memory_kind="saved for backward", device="cpu", torch="2.13.0", threads=2, notes=("A note.",),
)  # fmt: skip


def test_the_table_has_the_numbers() -> None:
    assert str(RESULT) == repr(RESULT)
    lines = {line.split()[0]: line.split() for line in str(RESULT).splitlines() if line}
    assert lines["float32"] == "float32 250 ms 10.0 % 1.00 3.0 MiB 2 1.25".split()
    assert lines["habana"] == "habana 12.5 us - 0.50 512 B 2 nan".split()
    assert lines["torch.autocast:"][1] == "ValueError:" and lines["A"] == ["A", "note."]


def test_progress_is_one_line_on_stderr_and_gone_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    hmp.benchmark(nothing, ["float32"], progress=True, **ONCE)
    printed = capsys.readouterr()
    assert "float32" in printed.err and printed.err.endswith("\r\033[K") and "\n" not in printed.err
    hmp.benchmark(nothing, ["float32"], **ONCE)
    assert capsys.readouterr().err == ""
