"""All measurements of one task: two searches, training with other seeds and for longer, step times, bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..harness.sides import autocast
from ..harness.stats import paired_ratio
from . import cost
from .search import OBJECTIVES, timed_search
from .task import Task
from .training import FLOAT32, Trained, change, known_sides, train, under

# How many times as fast as float32 torch.autocast must be for a larger task to show what tuned lists are worth in time.
PAYS = 1.3
# A part of each weight that is less than its rounding to bfloat16.
NUDGE = 1e-3
START, NUDGED = "start", "float32, nudged"


@dataclass(frozen=True)
class Extent:
    """The amount to measure. The seeds differ from the search's, which is 0."""

    seeds: tuple[int, ...] = (1, 2)
    longer: float = 2.0
    rounds: int = 7
    seconds: float = 0.3
    max_trials: int | None = 20


QUICK = Extent(seeds=(1,), longer=1.0, rounds=3, seconds=0.05, max_trials=12)


def collect(task: Task, extent: Extent, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the measurements of one task as plain values; of a larger one only step times, if low precision does not pay here."""
    started = time.perf_counter()
    if task.large:
        say(f"{task.name}: does low precision pay here?")
        times = cost.step_times(task, [FLOAT32, autocast("cpu")], extent.rounds, extent.seconds)
        if paired_ratio(times["float32"], times["autocast"]).value < PAYS:
            return {"name": task.name, "about": task.about, "large": True, "searches": {}, "seconds a step": times}
    searches, tuned = {}, {}
    for objective in OBJECTIVES:
        say(f"{task.name}: searching for {objective}")
        policy, searches[objective] = timed_search(task, objective, folder / task.name / objective, extent.max_trials)
        tuned[objective] = under(tuned_name(objective), policy)
    known = known_sides()
    torchs = known.pop("autocast")  # it is timed; its lists under hmp are what training is compared with
    broken = {START: under(START, task.start())} if task.broken else {}
    trained = [*known.values(), *broken.values(), *tuned.values()]
    steps = round(extent.longer * task.steps)
    runs: dict[str, list[Trained]] = {}
    for seed in extent.seeds:
        for side in trained:
            say(f"{task.name}: training, seed {seed}, {side.name}")
            runs.setdefault(side.name, []).append(train(task, side, seed, steps))
        runs.setdefault(NUDGED, []).append(train(task, FLOAT32, seed, steps, NUDGE))
    say(f"{task.name}: timing")
    timed = [torchs, *known.values(), *tuned.values()]
    return {
        "name": task.name,
        "about": task.about,
        "large": task.large,
        "measure": task.measure,
        "tolerance": task.tolerance,
        "bound": next(iter(task.tolerance.values())),
        "start": task.start().name,
        "broken": task.broken,
        "culprits": sorted(task.culprits),
        "steps": steps,
        "steps of the search": task.steps,
        "seeds": list(extent.seeds),
        "searches": searches,
        "searched": searched(task),
        "trained": {name: [asdict(run) for run in found] for name, found in runs.items()},
        "figures": {name: fmean(run.figure for run in found) for name, found in runs.items()},
        "changes": changes(task, runs),
        "seconds a step": cost.step_times(task, timed, extent.rounds, extent.seconds),
        "bytes": {side.name: cost.saved_bytes(task, side) for side in timed},
        "seconds": round(time.perf_counter() - started, 1),
    }


def tuned_name(objective: str) -> str:
    """Return the name of the side of the lists that were tuned for `objective`."""
    return f"tuned for {objective}"


def changes(task: Task, runs: dict[str, list[Trained]]) -> dict[str, float]:
    """Return how much worse than float32 each side is, relative: means over the seeds, each against float32 with the same seed."""
    reference = runs["float32"]
    return {
        name: fmean(change(task.measure, run.figure, base.figure) for run, base in zip(found, reference, strict=True))
        for name, found in runs.items()
    }


def searched(task: Task) -> dict[str, float]:
    """Return the results of the search's run in float32 and under the start, without hmp.tune: a broken start is out of tolerance."""
    base = train(task, FLOAT32, 0)
    start = train(task, under(START, task.start()), 0)
    return {"float32": base.figure, "start": start.figure, "change": change(task.measure, start.figure, base.figure)}
