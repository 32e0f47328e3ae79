"""`python -m benchmarks.tuning.packed`: the final losses of nine tasks with packed activations, against torch.autocast.

Each seed trains several times, from weights that were moved by a millionth: the differences under torch.autocast are not due to packing.
With --spread the rows of each input (images, embedded words) differ by up to that factor. Prints a
table, and with --write its samples as JSON; about twenty minutes on one idle core.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from ..harness import results
from ..workloads import at_width
from .task import Task
from .tasks import MODELS, PLANTED
from .training import known_sides, train, under

POLICY, NUDGE = "saved8", 1e-6
_WIDTH, _ROWS, _STEPS = 128, 4, 24  # of the models whose bytes are measured, which learn four batches by heart
HEADING = ("task", "torch.autocast", "its spread over nudges", "saved8", "standard error over seeds")

# By seed: the losses under torch.autocast and under the policy, one for each nudge.
Losses = dict[int, tuple[list[float], list[float]]]


def _of_width(name: str) -> Task:
    def batches(seed: int) -> list[Any]:
        return [at_width.build(name, _WIDTH, _ROWS, 100 * seed + number) for number in range(4)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return replace(batch, model=model).loss()

    return Task(
        name=f"{name}-{_WIDTH}",
        about=f"{name} of width {_WIDTH}",
        model=lambda seed: at_width.build(name, _WIDTH, _ROWS, seed).model,
        batches=batches,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=_STEPS,
        tolerance={"loss": 0.01},
    )


TASKS = MODELS | PLANTED | {f"{name}-{_WIDTH}": _of_width(name) for name in at_width.NAMES}


def uneven(task: Task, spread: float) -> Task:
    """Return the task with each row of its inputs scaled by a factor of its own, up to `spread`."""

    def factors(shape: torch.Size) -> torch.Tensor:
        return spread ** (torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5)

    def scaled(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value * factors(value.shape[:1]).view(-1, *[1] * (value.ndim - 1)) if is_float else value

    def of_call(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return tuple(map(scaled, args)), {name: scaled(value) for name, value in kwargs.items()}

    def of_words(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * factors(result.shape[:-1])[..., None]

    def made(make: Callable[[int], nn.Module], seed: int) -> nn.Module:
        model = make(seed)
        words = next((each for each in model.modules() if isinstance(each, nn.Embedding)), None)
        if words is None:
            model.register_forward_pre_hook(of_call, with_kwargs=True)
        else:
            words.register_forward_hook(of_words)
        return model

    return replace(task, model=partial(made, task.model))


def losses(task: Task, seeds: int, nudges: int) -> Losses:
    """Return the final losses of plain training loops."""
    theirs, ours = known_sides()["autocast"], under(POLICY, POLICY)
    by = [NUDGE * number for number in range(nudges)]
    return {seed: tuple([train(task, side, seed, nudge=nudge).loss for nudge in by] for side in (theirs, ours)) for seed in range(seeds)}  # type: ignore[misc]


def row(name: str, found: Losses) -> tuple[str, ...]:
    """Return the mean loss, the spread if only the last bits of the weights differ, and the distance of the policy's losses."""
    spread = [stdev(theirs) / fmean(theirs) for theirs, _ in found.values() if len(theirs) > 1]
    apart = [fmean(ours) / fmean(theirs) - 1 for theirs, ours in found.values()]
    error = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    mean = fmean(fmean(theirs) for theirs, _ in found.values())
    between = f"{100 * min(spread):.2f} to {100 * max(spread):.2f} %" if spread else "-"
    return name, f"{mean:.4g}", between, f"{100 * fmean(apart):+.2f} %", f"{100 * error:.2f} %"


def main(arguments: list[str] | None = None) -> int:
    """Train and print."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.tuning.packed", description=__doc__)
    options.add_argument("--only", action="append", choices=list(TASKS), metavar="NAME", help=f"of {', '.join(TASKS)}; may be given again")
    options.add_argument("--seeds", type=int, default=5, help="(5)")
    options.add_argument("--nudges", type=int, default=3, help="trainings of each seed and side (3)")
    options.add_argument("--spread", type=float, default=1.0, metavar="FACTOR", help="by which the rows of inputs differ, at most (1)")
    options.add_argument("--write", type=Path, metavar="FILE", help="for the losses, as JSON")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    print("| " + " | ".join(HEADING) + " |\n|---|---|---|---|---|")
    for name in given.only or TASKS:
        found[name] = losses(uneven(TASKS[name], given.spread), given.seeds, given.nudges)
        print("| " + " | ".join(row(name, found[name])) + " |", flush=True)
    if given.write is not None:
        given.write.write_text(json.dumps(results.plain_values(found), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
