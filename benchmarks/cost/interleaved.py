"""All sides of one model, in turns.

A visit is one side's stretch of a round: its casts become active, each of its tasks takes a few steps that are not counted and then a few
that are, and their median is the visit's sample. The sides' order changes from round to round, and a ratio is taken round by round.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..harness.sides import Side, rotated
from ..harness.stats import Estimate, paired_ratio
from ..harness.timing import WALL, Clock, step_seconds, steps_for
from ..workloads.models import Case

# what is timed, and the autograd mode that it runs in; "one" is inference on one example, the others run on the whole batch
TASKS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "training": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "no_grad, one": torch.no_grad,
    "inference_mode, one": torch.inference_mode,
}
LEARNING_RATE = 1e-4
# by task and side, seconds a step, one for each round
Samples = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Lane:
    """A side, a model that no other lane trains, and the tasks to measure."""

    side: Side
    case: Case
    tasks: tuple[str, ...]


def stepper(case: Case, task: str, side: Side) -> Callable[[], object]:
    """Return a function that runs one step of `task` on `side`, and set the model's mode."""
    case.model.train(task == "training")
    if task == "training":
        optimizer = torch.optim.SGD(case.model.parameters(), lr=LEARNING_RATE)
        return lambda: case.step(optimizer, side.run)
    mode = TASKS[task]
    output = case.one_output if task.endswith(", one") else case.output

    def infer() -> None:
        with mode():
            side.run(output)

    return infer


def time_lanes(lanes: list[Lane], rounds: int, seconds: float, device: str, clock: Clock = WALL) -> Samples:
    """Time every lane in `rounds` rounds; a task takes about `seconds` of a visit, with the same number of steps in every lane."""
    samples: Samples = {}
    for lane in lanes:
        for task in lane.tasks:
            samples.setdefault(task, {})[lane.side.name] = []
    steps: dict[str, int] = {}
    gc.collect()
    for number in range(rounds):
        for lane in rotated(lanes, number):
            with lane.side.visit():
                for task in lane.tasks:
                    step = stepper(lane.case, task, lane.side)
                    if task not in steps:
                        step()
                        steps[task] = steps_for(seconds, step, device, clock.least)
                    samples[task][lane.side.name].append(step_seconds(step, steps[task], device, clock))
    return samples


def ratio(samples: Samples, task: str, of: str = "hmp", over: str = "autocast") -> Estimate:
    """Return one side's time over another's, in one task."""
    return paired_ratio(samples[task][of], samples[task][over])


def own(case: Case) -> Case:
    """Return a copy of the model, with the same weights and batch."""
    return replace(case, model=copy.deepcopy(case.model))


def pure_low(case: Case) -> Case:
    """Return the case as a pure bfloat16 model: `model.to(bfloat16)`, and floating-point inputs in bfloat16."""
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in case.batch.items()}
    return replace(case, model=copy.deepcopy(case.model).bfloat16(), batch=batch)
