"""The cost of a training step of a task on each side: its time, in turns, and the bytes that it saves for backward."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable

from hmp.tools.saved_activations import saved_by

from ..harness.sides import Side, rotated
from ..harness.timing import WALL, step_seconds, steps_for
from .task import Task
from .training import step


def saved_bytes(task: Task, side: Side, seed: int = 0) -> int:
    """Return the bytes that one forward pass with its loss saves for backward, each storage once, without parameters and buffers."""
    model = task.model(seed)
    batch = task.batches(seed)[0]
    with side.visit():
        side.run(lambda: task.loss(model, batch)).backward()  # whatever is made once has been made
        model.zero_grad(set_to_none=True)
        return saved_by(lambda: side.run(lambda: task.loss(model, batch)), [*model.parameters(), *model.buffers()])


def stepper(task: Task, side: Side, seed: int = 0) -> Callable[[], object]:
    """Return a function that makes the next step on `side`."""
    model = task.model(seed)
    batches = itertools.cycle(task.batches(seed))
    optimizer = task.optimizer(model)
    return lambda: step(task, model, next(batches), optimizer, side)


def step_times(task: Task, sides: Iterable[Side], rounds: int, seconds: float, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of a step on each side, one a round; the sides take turns, and each comes first equally often."""
    order = list(sides)
    steppers = {side.name: stepper(task, side) for side in order}
    samples: dict[str, list[float]] = {side.name: [] for side in order}
    count = 0
    gc.collect()
    for number in range(rounds):
        for side in rotated(order, number):
            with side.visit():
                if not count:
                    steppers[side.name]()
                    count = steps_for(seconds, steppers[side.name], device, least=2)
                samples[side.name].append(step_seconds(steppers[side.name], count, device, WALL))
    return samples
