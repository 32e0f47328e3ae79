"""A task: a model, data with a structure to learn, a loss, an optimizer and possibly a metric on held-out data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hmp import Policy

# An accuracy may be 1 % worse than float32's, a loss 2 %. Both are what float32 itself moves by from one seed to another (the spread
# that TUNING.md states beside each task), so that a tighter bound would judge luck; a planted failure costs several times as much.
ACCURACY = {"metric": 0.01}
LOSS = {"loss": 0.02}


@dataclass(frozen=True)
class Task:
    """One task. `model` and `batches` are drawn from the seed that they get; the held-out data is always the same.

    `steps` is the length of the search's training runs. `start` returns the policy that the search begins with. With `broken`, a
    description of what is wrong with it, the task is a planted failure, and `culprits` are the ops that must all leave low precision.
    `large`: low precision can pay in time, on a processor that has instructions for it.
    """

    name: str
    about: str
    model: Callable[[int], nn.Module]
    batches: Callable[[int], list[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    steps: int
    tolerance: dict[str, float]
    metric: Callable[[nn.Module], float] | None = None
    start: Callable[[], Policy] = lambda: Policy.load("habana")
    broken: str = ""
    culprits: frozenset[str] = frozenset()
    transformers: bool = False
    large: bool = False

    @property
    def measure(self) -> str:
        """The figure of the tolerance: "loss" or "accuracy"."""
        return "loss" if "loss" in self.tolerance else "accuracy"


def annealed(rate: float, halved_after: int) -> Callable[[nn.Module], Optimizer]:
    """Return AdamW with a learning rate that is halved after so many steps, a third of the first after twice as many, and so on.

    At a constant rate the last bits of the weights change the accuracy of these models by more than the tolerance.
    """

    def make(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        taken = 0

        def slower(*_: Any) -> None:
            nonlocal taken
            taken += 1
            for group in optimizer.param_groups:
                group["lr"] = rate / (1 + taken / halved_after)

        optimizer.register_step_post_hook(slower)
        return optimizer

    return make
