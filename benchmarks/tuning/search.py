"""One search of hmp.tune() on a task, and its result as plain values."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

import hmp
from hmp.tools.tune.result import TuneResult

from .task import Task

OBJECTIVES = ("time", "memory")


def search(
    task: Task,
    objective: str,
    *,
    folder: Path | None = None,
    ops: Collection[str] | None = None,
    max_trials: int | None = None,
    seed: int = 0,
) -> TuneResult:
    """Run tune() for the task, from its start and within its tolerance; write the lists into `folder`."""
    model = task.model(seed)
    return hmp.tune(
        model,
        task.batches(seed),
        loss=task.loss,
        tolerance=task.tolerance,
        metric=task.metric,
        optimizer=task.optimizer,
        max_trials=max_trials,
        start=task.start(),
        ops=ops,
        objective=objective,
        steps=task.steps,
        seed=seed,
        folder=folder,
        progress=False,
    )


def low_ops(policy: hmp.Policy, called: Collection[str]) -> list[str]:
    """Return the ops that the policy runs in its low-precision dtype."""
    return sorted(set(policy.casts_by_op("bf16")) & set(called))


def summary(task: Task, result: TuneResult, seconds: float) -> dict[str, Any]:
    """Return the parts of a result that the report shows."""
    called = {unit.op for unit in result.units}
    low, before = low_ops(result.policy, called), low_ops(task.start(), called)
    return {
        "policy": result.policy.to_dict(),
        "chosen": result.best.name,
        "decided": sorted(called),
        "low": low,
        "taken off": sorted(set(before) - set(low)),
        "put on": sorted(set(low) - set(before)),
        "loss change": result.best.loss_change,
        "metric change": result.best.metric_change,
        "ratio": result.best.ratio,
        "saved bytes": result.best.saved_bytes,
        "evaluations": len(result.trials),
        "outside": sum(not trial.fits for trial in result.trials),
        "stopped": result.stopped,
        "seconds": round(seconds, 1),
    }


def timed_search(task: Task, objective: str, folder: Path | None, max_trials: int | None) -> tuple[hmp.Policy, dict[str, Any]]:
    """Return the tuned policy, and the summary of the search."""
    torch.manual_seed(0)
    started = time.perf_counter()
    result = search(task, objective, folder=folder, max_trials=max_trials)
    return result.policy, summary(task, result, time.perf_counter() - started)
