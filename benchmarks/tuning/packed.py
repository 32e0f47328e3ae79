"""`python -m benchmarks.tuning.packed`: what nine tasks' losses end at where what is kept for backward is packed, beside torch.autocast.

Each seed trains several times, from weights that were moved by a millionth: what those differ by under torch.autocast is no doing of
packing. Prints a table, and with --write its samples as JSON; about twenty minutes on one idle core.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch

from ..harness import results
from .task import Task
from .tasks import MODELS, PLANTED
from .training import known_sides, train, under

POLICY, NUDGE = "saved8", 1e-6
TASKS = MODELS | PLANTED
HEADING = ("task", "torch.autocast", "its spread over nudges", "saved8", "standard error over seeds")

# By seed: the losses under torch.autocast and under the policy, one for each nudge.
Losses = dict[int, tuple[list[float], list[float]]]


def losses(task: Task, seeds: int, nudges: int) -> Losses:
    """What plain training loops end at."""
    theirs, ours = known_sides()["autocast"], under(POLICY, POLICY)
    by = [NUDGE * number for number in range(nudges)]
    return {seed: tuple([train(task, side, seed, nudge=nudge).loss for nudge in by] for side in (theirs, ours)) for seed in range(seeds)}  # type: ignore[misc]


def row(name: str, found: Losses) -> tuple[str, ...]:
    """The mean loss, the spread where only the last bits of the weights differ, and how far the policy's losses are from it."""
    spread = [stdev(theirs) / fmean(theirs) for theirs, _ in found.values() if len(theirs) > 1]
    apart = [fmean(ours) / fmean(theirs) - 1 for theirs, ours in found.values()]
    error = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    mean = fmean(fmean(theirs) for theirs, _ in found.values())
    between = f"{100 * min(spread):.2f} to {100 * max(spread):.2f} %" if spread else "-"
    return name, f"{mean:.4g}", between, f"{100 * fmean(apart):+.2f} %", f"{100 * error:.2f} %"


def main(arguments: list[str] | None = None) -> int:
    """Trains and prints."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.tuning.packed", description=__doc__)
    options.add_argument("--only", action="append", choices=list(TASKS), metavar="NAME", help=f"of {', '.join(TASKS)}; may be given again")
    options.add_argument("--seeds", type=int, default=5, help="(5)")
    options.add_argument("--nudges", type=int, default=3, help="trainings of each seed and side (3)")
    options.add_argument("--write", type=Path, metavar="FILE", help="for the losses, as JSON")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    print("| " + " | ".join(HEADING) + " |\n|---|---|---|---|---|")
    for name in given.only or TASKS:
        found[name] = losses(TASKS[name], given.seeds, given.nudges)
        print("| " + " | ".join(row(name, found[name])) + " |", flush=True)
    if given.write is not None:
        given.write.write_text(json.dumps(results.plain_values(found), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
