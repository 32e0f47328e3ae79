"""FP8 as the third level of a search: what it finds holds in a run of the user's, and what it says of it is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from tune_kit import to_sines as loss
from tune_kit import trained

LEVELS = ("fp8", "bf16", "fp32")
STEPS = 12


def slowly(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Two(nn.Module):
    """Two layers side by side; what rounding does to the second is multiplied by `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.first, self.second, self.out = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(x)) + torch.cos(self.scale * self.second(x)))


def two(scale: float = 0.1) -> tuple[Two, list[torch.Tensor]]:
    torch.manual_seed(0)
    return Two(scale), [torch.randn(16, 32) for _ in range(2)]


def tuned(made: Any, **options: Any) -> hmp.types.TuneResult:
    model, batches = made
    given = {"levels": LEVELS, "optimizer": slowly, "steps": STEPS, "tolerance": 0.05, "objective": "memory"} | options
    return hmp.tune(model, batches, loss=loss, **given)


def trained_under(policy: hmp.Policy, scale: float) -> float:
    """The loss after training in a loop that is none of tune()'s."""
    model, batches = two(scale)
    return trained(model, batches, loss, STEPS, slowly, around=lambda: hmp.casts(policy, model=model))


@pytest.mark.slow
def test_the_products_that_can_be_are_in_fp8_and_the_numbers_are_those_of_runs_of_the_users() -> None:
    result = tuned(two())
    assert result.policy.fp8 == {"linear"}
    assert result.best.on("fp8") == ("linear",)
    assert result.best.fits
    # floating-point operations: 2 for each weight and row; the layer with 3 outputs cannot run in FP8
    able, all_of_them = 2 * 16 * (2 * 32 * 64), 2 * 16 * (2 * 32 * 64 + 64 * 3)
    (linear,) = [unit for unit in result.units if (unit.op, unit.level) == ("linear", "fp8")]
    assert (linear.gain, linear.of) == (able, all_of_them)
    assert result.share("fp8") == pytest.approx(able / all_of_them)
    assert f"{able / all_of_them:.0%} of the matrix multiplication FLOPs" in str(result)
    assert result.best.loss == pytest.approx(trained_under(result.policy, 0.1), rel=1e-6)
    plain, batches = two()
    assert abs(result.best.loss / trained(plain, batches, loss, STEPS, slowly, around=None) - 1) <= 0.05


def test_the_error_is_that_of_quantised_operands() -> None:
    result = tuned(two(), per_module=True, max_trials=3, optimizer=None, ops=["linear"])
    (unit,) = [unit for unit in result.units if (unit.name, unit.level) == ("linear @ first", "fp8")]
    model, (x, _) = two()

    def quantised(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.abs().max().double() / 448
        return (tensor.double() / scale).to(torch.float8_e4m3fn).double() * scale

    model.requires_grad_(False)
    exact = F.linear(x, model.first.weight, model.first.bias).double()
    product = (quantised(x) @ quantised(model.first.weight).T).bfloat16()
    in_fp8 = (product + model.first.bias.bfloat16()).double()
    assert unit.error == pytest.approx(float((in_fp8 - exact).norm() / exact.norm()), rel=0.02)


def test_a_module_that_fp8_is_too_coarse_for_stays_out_of_it() -> None:
    """The second layer's result is tens of radians, of which FP8 keeps four bits: its cosine is noise."""
    result = tuned(two(30.0), per_module=True, optimizer=None)
    assert result.best.on("fp8") == ("linear @ first",)
    (second,) = [unit for unit in result.units if (unit.name, unit.level) == ("linear @ second", "fp8")]
    assert second.why == "exceeds the tolerance (found by bisection)"
    model, batches = two(30.0)
    with hmp.casts(result.policy, model=model), hmp.record() as report:
        assert result.best.loss == pytest.approx(sum(float(loss(model, x).detach()) for x in batches) / len(batches), rel=1e-6)
    in_fp8 = {row.module for row in report.rows if row.rule == "fp8"}
    assert "first" in in_fp8 and "second" not in in_fp8
    one = {unit.name: unit.of for unit in result.units if unit.level == "fp8"}
    assert result.share("fp8") == pytest.approx(one["linear @ first"] / sum(one.values()))


@pytest.mark.slow
def test_the_folder_holds_the_lists_of_the_last_search(tmp_path: Path) -> None:
    result = tuned(two(), per_module=True, folder=tmp_path)
    assert hmp.Policy.load(tmp_path) == result.policy
    assert "| chosen" in (tmp_path / "fp8.txt").read_text()
    other = tuned(two(), folder=tmp_path, levels=("bf16", "fp32"))
    assert not (tmp_path / "fp8.txt").exists()
    assert hmp.Policy.load(tmp_path) == other.policy


def test_a_budget_that_is_spent_before_fp8_says_so() -> None:
    short = {"optimizer": None, "ops": ["linear"], "max_trials": 3}
    short_of = tuned(two(), **short)
    assert "budget is spent" in str(short_of) and [unit.why for unit in short_of.units if unit.level == "fp8"] == ["not tried"]
    assert "fp8" not in str(tuned(two(), **short, levels=("bf16", "fp32")))


@pytest.mark.slow
def test_where_fp8_is_emulated_it_has_no_time(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    emulated = tuned(two(), objective="time")
    assert emulated.best.on("fp8") and emulated.best.ratio is None and "has to be measured on a device" in str(emulated)
    page = emulated.to_html(tmp_path / "tune.html").read_text(encoding="utf-8")
    assert "96% of the matrix multiplication FLOPs" in page and "Stay in float32" not in page
