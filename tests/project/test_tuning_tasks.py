"""Tasks for tuned lists can be repeated, and a search gets out of a planted failure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from benchmarks.tuning import cost
from benchmarks.tuning.search import low_ops, search
from benchmarks.tuning.task import Task
from benchmarks.tuning.tasks import TASKS
from benchmarks.tuning.training import FLOAT32, change, in_regions, train, under


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    hmp.revert()


def needed(name: str) -> Task:
    """The task, if what it needs is installed."""
    task = TASKS[name]
    if task.transformers:
        pytest.importorskip("transformers")
    if task.metric is not None and not name.startswith("bert"):
        pytest.importorskip("sklearn")
    return task


@pytest.mark.parametrize("name", ["lstm", *(pytest.param(name, marks=pytest.mark.nightly) for name in TASKS if name != "lstm")])
def test_same_seed_same_loss_and_another_seed_another(name: str) -> None:
    task = needed(name)
    one, again, other = (train(task, FLOAT32, seed, steps=3) for seed in (1, 1, 2))
    assert math.isfinite(one.loss)
    assert (one.loss, one.metric) == (again.loss, again.metric)
    assert one.loss != other.loss


@pytest.mark.slow
def test_a_search_is_within_the_tolerance_in_a_run_of_plain_torch(tmp_path: Path) -> None:
    task = TASKS["low-loss"]
    result = search(task, "memory", folder=tmp_path)
    hmp.revert()
    base = train(task, FLOAT32, 0)
    found = train(task, in_regions("tuned", result.policy), 0)
    assert change(task.measure, found.figure, base.figure) <= next(iter(task.tolerance.values()))
    assert result["float32"].loss == pytest.approx(base.loss, rel=1e-4)
    assert result.best.loss == pytest.approx(found.loss, rel=1e-3)
    assert cost.saved_bytes(task, under("tuned", result.policy)) < cost.saved_bytes(task, FLOAT32)
    assert not task.culprits & set(low_ops(result.policy, task.culprits))
    assert hmp.Policy.load(tmp_path) == result.policy
