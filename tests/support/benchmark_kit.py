"""What the tests of hmp.benchmark() share: a training to benchmark and a step that does nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hmp

ONCE: dict[str, Any] = {"rounds": 1, "steps": 1}
LINEAR = hmp.Policy("only linear", bf16={"linear"})


def nothing() -> None:
    """A step that has nothing to do."""


class Training:
    """A model with dropout, batch norm and an unsaved buffer, Adam, and one batch; calling it is one step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.model = nn.ModuleList([self.one, self.norm, self.two])
        self.model.register_buffer("calls", torch.zeros(()), persistent=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.x, self.y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
        self.linear: Callable[..., torch.Tensor] = lambda *arguments: F.linear(*arguments)  # found when called, so that it can be patched

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        hidden = F.dropout(self.norm(self.linear(self.x, self.one.weight, self.one.bias).float()), 0.5)
        loss = F.cross_entropy(self.linear(hidden, self.two.weight, self.two.bias).float(), self.y)
        loss.backward()
        self.optimizer.step()
        self.model.calls += 1
        return loss

    def benchmark(self, policies: Any = ("float32",), **options: Any) -> Any:
        return hmp.benchmark(self, policies, model=self.model, optimizer=self.optimizer, **options)

    def everything(self) -> tuple[Any, ...]:
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return copy.deepcopy((self.model.state_dict(), self.model.calls, self.optimizer.state_dict(), gradients))
