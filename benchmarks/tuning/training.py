"""A training run as tune() verifies one, in plain torch, so that no verdict depends on hmp.tune."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

import hmp

from ..harness.sides import Side, autocast
from .task import Task

FLOAT32 = Side("float32")


@dataclass(frozen=True)
class Trained:
    """The result of a training run. `loss` is the mean over the last pass over the batches, NaN from the first loss that is not finite;
    `metric` was taken under the side's casts and `metric_float32` of the same weights without any."""

    loss: float
    metric: float | None
    metric_float32: float | None
    seconds: float
    steps: int

    @property
    def figure(self) -> float:
        """The figure of the tolerance: the metric, or the loss if there is none; NaN if training failed."""
        if self.metric is None or self.metric_float32 is None or not math.isfinite(self.loss):
            return self.loss
        return min(self.metric, self.metric_float32)


def change(measure: str, figure: float, reference: float) -> float:
    """Return how much worse the figure is, relative to the reference; infinite if it is not finite.

    A loss far below counts as worse, too: the loss itself may have lost its digits.
    """
    if not math.isfinite(figure):
        return math.inf
    return abs(figure - reference) / reference if measure == "loss" else (reference - figure) / reference


def under(name: str, policy: hmp.Policy | str) -> Side:
    """Return a side whose policy is active for the whole visit, with backward; unlike `sides.under_hmp`, in the policy's own dtype."""
    return Side(name, visit=lambda: hmp.convert(policy=policy))


def known_sides(device: str = "cpu") -> dict[str, Side]:
    """Return what tuned lists are compared with: float32, torch.autocast, its lists under hmp, Habana's."""
    lists = f"torch-{device}"
    return {"float32": FLOAT32, "autocast": autocast(device), lists: under(lists, lists), "habana": under("habana", "habana")}


def train(task: Task, side: Side, seed: int, steps: int | None = None, nudge: float = 0.0) -> Trained:
    """Train `steps` steps, or as many as the search, from the weights, batches and random numbers of `seed`.

    `nudge` changes every weight by about that relative amount before the first step, which should make no difference.
    """
    steps = task.steps if steps is None else steps
    model = task.model(seed)
    batches = task.batches(seed)
    if nudge:
        _nudged(model, nudge)
    optimizer = task.optimizer(model)
    torch.manual_seed(seed)
    losses: list[float] = []
    start = time.perf_counter()
    with side.visit():
        for number in range(steps):
            losses.append(step(task, model, batches[number % len(batches)], optimizer, side))
            if not math.isfinite(losses[-1]):
                return Trained(math.nan, None, None, time.perf_counter() - start, number + 1)
        seconds = time.perf_counter() - start
        metric = None if task.metric is None else side.run(lambda: _measured(task, model))
    in_float32 = None if task.metric is None else _measured(task, model)
    return Trained(fmean(losses[-min(len(batches), max(steps // 2, 1)) :]), metric, in_float32, seconds, steps)


def step(task: Task, model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, side: Side) -> float:
    """Make one step and return its loss."""
    loss = side.run(lambda: task.loss(model, batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _nudged(model: torch.nn.Module, by: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + by * torch.randn(parameter.shape, generator=generator))


def _measured(task: Task, model: torch.nn.Module) -> float:
    assert task.metric is not None
    return float(task.metric(model))
