"""The user's task as tune() runs it: every run begins alike, and model, batches and random state are afterwards as they were."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import hmp
from hmp.tune.result import TuneResult
from tune_kit import perceptron, sgd, squared


def tuned(model: nn.Module, batches: Any, loss: Any = squared, **options: Any) -> TuneResult:
    return hmp.tune(model, batches, loss=loss, **{"optimizer": sgd, "objective": "memory", "steps": 2, "budget": "6 evaluations"} | options)


def test_a_metric_that_leaves_the_model_in_eval_changes_no_later_run() -> None:
    def accuracy(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(model(batches[0])[:, 0].mean())

    model, batches = perceptron()
    model.drop = nn.Dropout(0.5)
    seen = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(model.training)
        return squared(model, x)

    tuned(model, batches, loss, metric=accuracy, tolerance=0.5)
    assert all(seen)
    assert all(module.training for module in model.modules())


class Caching(nn.Module):
    """Puts other tensors in its buffers' places: a cache that grows, one that begins as None, one made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("grows", torch.zeros(1))
        self.register_buffer("none", None)
        self.register_buffer("counts", torch.zeros(1), persistent=False)
        self.alias = self.counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.grows = torch.cat([self.grows, self.grows])
        self.none = x.mean(0)
        self.counts += 1
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.ones(8))
        return torch.softmax(self.linear(x) + self.made, -1)


def test_buffers_that_forward_replaces_are_put_back() -> None:
    model, batches = Caching(), perceptron()[1]
    before = copy.deepcopy(model.state_dict())
    tuned(model, batches)
    assert {name: value.shape for name, value in model.state_dict().items()} == {name: value.shape for name, value in before.items()}
    assert model.none is None
    assert model.counts is model.alias
    assert float(model.counts) == 0.0
