"""The distance of a search from the best choice: every subset of a few ops is trained, so the cheapest that fits is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hmp
from hmp.tools.tune.result import Trial

from ..harness.sides import Side
from ..harness.stats import paired_ratio
from . import cost
from .evidence import Extent
from .search import OBJECTIVES, search
from .task import Task
from .training import FLOAT32, change, train, under

# Ops enough that several sets fit and several do not, few enough to try them all.
CASES: dict[str, tuple[str, ...]] = {
    "low-loss": ("linear", "layer_norm", "gelu", "mul", "add", "mse_loss"),
    "large-logits": ("square", "mul", "softmax", "matmul", "linear", "relu", "cross_entropy"),
    "rotary": ("linear", "matmul", "softmax", "mul", "layer_norm", "gelu", "cross_entropy"),
}


def subsets(ops: Collection[str]) -> Iterator[frozenset[str]]:
    """Return every set of the ops, the empty one first."""
    for size in range(len(ops) + 1):
        yield from map(frozenset, itertools.combinations(sorted(ops), size))


def policy_with(start: hmp.Policy, ops: Collection[str], low: Collection[str]) -> hmp.Policy:
    """Return `start` with `low` on the BF16 list and the rest of `ops` on the FP32 list."""
    others = {cast: {name for name in getattr(start, cast) if not _stands_for(cast, name, ops)} for cast in ("bf16", "fp32", "promote")}
    return hmp.Policy(
        name=f"low: {', '.join(sorted(low)) or 'nothing'}",
        dtype=start.dtype,
        bf16=frozenset(others["bf16"] | set(low)),
        fp32=frozenset(others["fp32"] | set(ops) - set(low)),
        promote=frozenset(others["promote"]),
    )


def _stands_for(cast: str, name: str, ops: Collection[str]) -> bool:
    named = hmp.Policy(**{cast: frozenset({name})}).casts_by_op(cast)  # type: ignore[arg-type]
    return bool(set(named) & set(ops))


def compare(task: Task, ops: tuple[str, ...], extent: Extent, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return every subset's loss and bytes, the time of those that fit, and the rank of the searches' choices.

    A choice need not be a subset: a preset that fits may be it, and leaves ops unlisted, which then run in the dtype that arrives.
    """
    bound = next(iter(task.tolerance.values()))
    base = train(task, FLOAT32, 0)
    base_bytes = cost.saved_bytes(task, FLOAT32)

    def tried(policy: hmp.Policy) -> dict[str, Any]:
        side = under("subset", policy)
        run = train(task, side, 0)
        worse = change(task.measure, run.figure, base.figure)
        return {"loss": run.loss, "change": worse, "fits": worse <= bound, "bytes": cost.saved_bytes(task, side) / base_bytes}

    rows: dict[frozenset[str], dict[str, Any]] = {}
    for number, low in enumerate(subsets(ops), 1):
        say(f"{task.name}: subset {number} of {2 ** len(ops)}")
        rows[low] = tried(policy_with(task.start(), ops, low))
    fitting = [low for low, row in rows.items() if row["fits"]]
    objectives: dict[str, dict[str, Any]] = {}
    policies: dict[str, hmp.Policy] = {}
    for objective in OBJECTIVES:
        say(f"{task.name}: searching for {objective} among {len(ops)} ops")
        result = search(task, objective, folder=folder / f"{task.name}, {len(ops)} ops" / objective, ops=ops)
        policies[objective] = result.policy
        objectives[objective] = {
            "chosen": result.best.name,
            "chosen low": None if result.best.taken else sorted(result.best.on("bf16")),
            "low": sorted(frozenset(result.policy.casts_by_op("bf16")) & set(ops)),
            "evaluations": len(result.trials),
            "chosen fits": tried(result.policy)["fits"],
            "losses apart": max((_apart(trial, rows) for trial in result.trials), default=0.0),
        }
    least = min(fitting, key=lambda low: rows[low]["bytes"])
    objectives["memory"] |= {
        "best": sorted(least),
        "best cost": rows[least]["bytes"],
        "chosen cost": tried(policies["memory"])["bytes"],
    }
    say(f"{task.name}: timing {len(fitting)} subsets")
    objectives["time"] |= _times(task, ops, policies["time"], fitting, extent)
    return {
        "name": task.name,
        "about": task.about,
        "ops": list(ops),
        "subsets": len(rows),
        "fitting": len(fitting),
        "float32": {"figure": base.figure, "bytes": base_bytes},
        "rows": [{"low": sorted(low), **row} for low, row in rows.items()],
        "objectives": objectives,
    }


def _apart(trial: Trial, rows: dict[frozenset[str], dict[str, Any]]) -> float:
    """Return the relative distance of a subset's loss in the search from that of the run here."""
    if trial.taken or not math.isfinite(trial.loss):
        return 0.0
    seen = rows[frozenset(trial.on("bf16"))]["loss"]
    return abs(trial.loss - seen) / abs(seen)


def _times(task: Task, ops: tuple[str, ...], policy: hmp.Policy, fitting: list[frozenset[str]], extent: Extent) -> dict[str, Any]:
    """Return the step times of the choice and of the fastest subset that fits, relative to float32's."""
    by_name = {f"subset {number}": low for number, low in enumerate(fitting)}
    sides: list[Side] = [FLOAT32, *(under(name, policy_with(task.start(), ops, low)) for name, low in by_name.items())]
    samples = cost.step_times(task, sides, extent.rounds, extent.seconds / 3)
    base = samples.pop("float32")
    ratios = {by_name[name]: paired_ratio(each, base).value for name, each in samples.items()}
    best = min(fitting, key=lambda low: ratios[low])
    # the least of many noisy figures is too small: the two are compared in rounds of their own
    pair = [FLOAT32, under("chosen", policy), under("best", policy_with(task.start(), ops, best))]
    again = cost.step_times(task, pair, 2 * extent.rounds, extent.seconds)
    return {
        "best": sorted(best),
        "best cost": paired_ratio(again["best"], again["float32"]).value,
        "chosen cost": paired_ratio(again["chosen"], again["float32"]).value,
        "chosen over best": asdict(paired_ratio(again["chosen"], again["best"])),
        "slowest that fits": max(ratios.values()),
    }
