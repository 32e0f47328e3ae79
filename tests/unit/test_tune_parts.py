"""Parts of a search: a list beside planted units that are too many, and what a result shows.

No public call chooses what fits and what does not, and a search for each answer takes minutes.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hmp
import tune_result_kit
from hmp.core import lists
from hmp.tools.tune.decisions import Key
from hmp.tools.tune.probe import Measured
from hmp.tools.tune.result import percent
from hmp.tools.tune.search import most_that_fit
from hmp.tools.tune.task import Task
from tune_kit import perceptron, sgd, squared


def test_the_table_has_the_choice_the_trials_and_how_it_ended() -> None:
    text = str(tune_result_kit.result())
    for each in ("linear", "matmul", "0.62", "habana", "autocast", "loss +4.00%, 1.00% allowed", "seed 0"):
        assert each in text, each
    assert "loss 0.10% worse and metric 0.11% worse" in text and text.count("(chosen)") == 1
    assert "no bound" in str(tune_result_kit.bare())
    assert "budget is spent" in str(tune_result_kit.result(stopped="budget"))
    slow = tune_result_kit.trial("slow", ("linear",), ratio=1.25)
    assert "Stay in float32" in str(tune_result_kit.result(best=slow))
    assert "0.71 of float32's bytes" in str(tune_result_kit.result(objective="memory"))


def test_a_change_has_its_sign_and_none_is_no_loss() -> None:
    shown = {0.012: "+1.20%", -0.012: "-1.20%", -0.0: "+0.00%", -1e-6: "under 0.01%", float("nan"): "not finite"}
    assert [percent(change) for change in shown] == list(shown.values())


def test_an_op_that_no_gradient_shows_changes_the_loss_by_its_error_and_one_that_cannot_run_by_infinitely_much() -> None:
    unseen, impossible = Measured(errors=4.0, norms=1.0), Measured(cannot="no kernel", has_gradient=True)
    assert (unseen.change(1.0), impossible.change(1.0)) == (2.0, math.inf)


def searched(order: list[Key], allowed) -> tuple[frozenset[Key], list[Key], int]:
    """What fits in the end, what was barred, and how many sets were tried."""
    tried: dict[frozenset[Key], bool] = {frozenset(): True}
    barred: list[Key] = []

    def fits(units: frozenset[Key], last: Key | None) -> bool:
        return tried.setdefault(units, allowed(units))

    most_that_fit(order, fits, barred.append)
    return max((units for units, is_good in tried.items() if is_good), key=len), barred, len(tried) - 1


def keys(count: int) -> list[Key]:
    return [Key(f"op{at}") for at in range(count)]


@given(st.integers(0, 12), st.sets(st.integers(0, 11), max_size=3))
def test_units_that_fit_with_no_other_are_found_and_all_others_stay(count: int, culprits: set[int]) -> None:
    order = keys(count)
    planted = {Key(f"op{at}") for at in culprits} & set(order)
    found, barred, tried = searched(order, lambda units: not units & planted)
    assert found == frozenset(order) - planted and set(barred) == planted
    assert tried <= 1 + len(planted) * (1 + len(order).bit_length())


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 3))
def test_what_is_left_out_is_one_too_many(changes: list[float], bound: float) -> None:
    """Changes add up."""
    order = keys(len(changes))
    of = dict(zip(order, changes, strict=True))
    found, barred, _ = searched(order, lambda units: sum(of[key] for key in units) <= bound)
    assert found | set(barred) == set(order)
    for key in barred:
        assert sum(of[each] for each in {*found, key}) > bound - 1e-9


@pytest.mark.parametrize(("plain", "allowed", "best"), [(0.5, 0.1, "no lists"), (0.79, 0.1, "habana"), (0.79, 0.02, "no lists")])
def test_the_best_in_the_budget_is_within_each_bound_and_faster_than_noise(plain: float, allowed: float, best: str, monkeypatch) -> None:
    seconds = {"habana": 0.8, "no lists": plain}
    monkeypatch.setattr(Task, "timed", lambda task, policy, about: seconds.get(policy.name, 1.0) if policy is not None else 1.0)
    model, batches = perceptron()
    given = {"metric": lambda m: 4.0 - 0.1 * (m.first(batches[0]).dtype is not torch.float32), "tolerance": {"loss": 1, "metric": allowed}}
    result = hmp.tune(model, batches, loss=squared, optimizer=sgd, steps=3, max_trials=5, start="habana", **given)
    assert (result.stopped, len(result.trials), result.best.name, result.best.fits) == ("budget", 5, best, True)
    assert (result["float32"].ratio, result["no lists"].ratio) == (1.0, plain)
    assert result["habana"].metric_change == pytest.approx(0.1 / 4)  # of 4 in float32


@pytest.mark.slow
def test_where_fp8_is_computed_it_must_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = lists.kind_of("fp8")
    assert kind.level is not None
    object.__setattr__(kind, "level", replace(level := kind.level, shows=lambda *_: True))
    monkeypatch.setattr(Task, "timed", lambda task, policy, about: 2.0 if policy is not None and policy.fp8 else 1.0)
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3)), [torch.randn(16, 32) for _ in range(2)]

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """A step with FP8 is slower whatever else the machine does."""
        if hmp.explain("linear").cast == "fp8":
            time.sleep(0.02)
        return m(x).square().mean()

    given = {"loss": loss, "optimizer": sgd, "steps": 12, "tolerance": 0.1}
    try:
        result = hmp.tune(model, batches, levels=("fp8", "bf16", "fp32"), objective="time", **given)
    finally:
        object.__setattr__(kind, "level", level)
    assert any(trial.on("fp8") and trial.fits and trial.ratio is not None for trial in result.trials)
    assert not result.policy.fp8 and {unit.why for unit in result.units if unit.level == "fp8"} == {"within the tolerance, but no gain"}
