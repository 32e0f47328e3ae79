"""The saved list as a level of a search for few bytes: what it finds holds in a run of the user's, and what it says of it is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from saved_oracle import packs
from tune_kit import sgd, trained
from tune_kit import to_sines as loss

pytestmark = packs
STEPS = 6
START = hmp.Policy("start", bf16={"linear"})


class Act(nn.Module):
    """gelu of a layer, in whose blocks of 128 one number may be so large that eight bits leave nothing of the others."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 127)
        self.register_buffer("last", torch.full((64, 1), largest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.cat([self.linear(x), self.last.to(x.dtype)], 1))


class Two(nn.Module):
    def __init__(self, largest: float, around: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.out, self.around = Act(1.0), Act(largest), nn.Linear(128, 3), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.out(torch.tanh((F.gelu(first) if self.around else first) + self.second(x)))


def two(largest: float) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    return Two(largest), [torch.randn(64, 16) for _ in range(2)]


def tuned(largest: float, **options: Any) -> hmp.types.TuneResult:
    model, batches = two(largest)
    given = {"optimizer": sgd, "steps": STEPS, "tolerance": 0.02, "ops": ["linear"], "start": START} | options
    return hmp.tune(model, batches, loss=loss, objective="bytes", **given)


def packs_gelu(policy: hmp.Policy, model: nn.Module, batches: list[torch.Tensor]) -> set[str]:
    """The modules in which what gelu keeps is packed."""
    with hmp.casts(policy, model=model), hmp.record() as report:
        loss(model, batches[0])
    return {row.module for row in report.kept if row.op == "gelu"}


def why(result: hmp.types.TuneResult, name: str) -> str:
    (found,) = (unit.why for unit in result.units if (unit.name, unit.level) == (name, "saved"))
    return found


def test_all_that_is_kept_is_packed_and_the_folder_says_what_that_brings(tmp_path: Path) -> None:
    result = tuned(1.0, folder=tmp_path)
    before = min((trial for trial in result.trials[1:] if trial.fits and not trial.on("saved")), key=lambda trial: trial.saved_bytes)
    assert result.policy.saved == {"gelu", "tanh", "linear"} and result.policy.saved_recipe == "int8"
    assert result.best.on("saved") == ("gelu", "linear", "tanh")
    assert result.best.saved_bytes < 0.6 * min(trial.saved_bytes for trial in result.trials if not trial.on("saved"))
    assert before.policy == result.policy.replace(name=before.name, saved=frozenset(), saved_recipe=before.policy.saved_recipe)
    model, batches = two(1.0)
    assert result.best.loss == pytest.approx(
        trained(model, batches, loss, STEPS, sgd, around=lambda: hmp.casts(result.policy, model=model)), rel=1e-6
    )
    assert hmp.Policy.load(tmp_path) == result.policy
    # 64 rows of 128 numbers in float32, twice; a byte each and eight for each 128
    (gelu,) = (unit for unit in result.units if (unit.op, unit.level) == ("gelu", "saved"))
    assert (gelu.of, gelu.of - gelu.gain) == (2 * 64 * 128 * 4, 2 * 64 * (128 + 8))
    assert "47.0 KiB of 64.0 KiB | " in (tmp_path / "saved.txt").read_text(encoding="utf-8")
    assert "3 of 3 units on the saved list" in str(result)


@pytest.mark.slow
def test_a_module_whose_gradients_packing_spoils_is_left_out_by_scoped_lines(tmp_path: Path) -> None:
    result = tuned(1e4, per_module=True, folder=tmp_path)
    assert "gelu @ first" in result.best.on("saved") and "gelu @ second" not in result.best.on("saved")
    assert "exceeds the tolerance" in why(result, "gelu @ second")
    model, batches = two(1e4)
    assert packs_gelu(hmp.Policy.load(tmp_path), model, batches) == {"first"}
    found = trained(model, batches, loss, STEPS, sgd, around=lambda: hmp.casts(result.policy, model=model))
    assert result.best.loss == pytest.approx(found, rel=1e-6)
    # with that one packed too a run of the user's is beyond the tolerance
    model, batches = two(1e4)
    all_packed = result.policy.replace(saved=frozenset({"*"}), scoped=tuple(e for e in result.policy.scoped if e.list_name != "saved"))
    exact = trained(*two(1e4), loss, STEPS, sgd)
    spoiled = trained(model, batches, loss, STEPS, sgd, around=lambda: hmp.casts(all_packed, model=model))
    assert abs(found / exact - 1) <= 0.02 < abs(spoiled / exact - 1)


def test_what_no_line_can_pack_is_not_said_to_be_packed() -> None:
    """The model calls gelu itself, beside the modules inside."""
    torch.manual_seed(0)
    model, batches = Two(1e4, around=True), [torch.randn(64, 16) for _ in range(2)]
    options = {"optimizer": sgd, "steps": STEPS, "tolerance": 0.02, "ops": ["linear"], "start": START}
    result = hmp.tune(model, batches, loss=loss, objective="bytes", per_module=True, **options)
    assert "gelu @ first" in result.best.on("saved") and not {"gelu", "gelu @ second"} & set(result.best.on("saved"))
    assert "for other modules" in why(result, "gelu")
    assert packs_gelu(result.policy, model, batches) == {"first"}


def test_where_there_is_nothing_to_pack_no_trial_is_made() -> None:
    model, batches = nn.Linear(8, 3), [torch.randn(4, 8)]
    result = hmp.tune(model, batches, loss=loss, objective="bytes", tolerance=0.1, start=START)
    assert not any(trial.on("saved") for trial in result.trials)


def test_a_saved_list_to_start_from_stays_as_it_is(tmp_path: Path) -> None:
    model, batches = two(1.0)
    options = {"loss": loss, "objective": "memory", "tolerance": 0.1, "max_trials": 4, "folder": tmp_path, "ops": ["linear"]}
    assert hmp.tune(model, batches, start="saved8", **options).policy.saved == {"*"}
    assert "*  # not decided; as in saved8" in (tmp_path / "saved.txt").read_text(encoding="utf-8")
