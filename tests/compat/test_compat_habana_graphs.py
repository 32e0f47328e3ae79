"""A step captured by torch.hpu.HPUGraph and replayed is the step: bit for bit what plain torch computes, or an error that says why not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hmp
from hmp.compat.habana.kernels import FusedClipNorm
from hmp.compat.habana.optimizers import FusedLamb, FusedLars

pytestmark = pytest.mark.usefixtures("hpu_on_cpu")


class Model(nn.Module):
    """Dropout, statistics that are written in place, a loop over time, views, a weight that is used twice, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.cell = nn.GRUCell(6, 6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(functional.dropout(functional.gelu(self.inner(x)), 0.3))
        state = torch.zeros_like(x)
        for row in x.view(2, 4, 6).unbind():
            state = self.cell(row.repeat(2, 1), state)
        heads = torch.stack([x, state]).view(2, 8, 2, 3).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 8, 6).sum(0)
        return self.outer(self.inner(x)) * torch.tensor([1.0, 2.0, 3.0]).mul_(0.5)


class Task:
    """A model, static tensors, and batches that are copied into them."""

    def __init__(self, optimizer: Callable[[Any], Any], model: Callable[[], nn.Module] = Model) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = optimizer(list(self.model.parameters()))
        self.batches = torch.randn(7, 8, 6), torch.randn(7, 8, 3)
        self.x, self.y = torch.empty(8, 6), torch.empty(8, 3)
        self.losses: list[float] = []

    def take(self, number: int) -> None:
        self.x.copy_(self.batches[0][number])
        self.y.copy_(self.batches[1][number])

    def step(self) -> torch.Tensor:
        loss = functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        with hmp.disable_casts():  # as Habana's scripts have it
            FusedClipNorm(self.model.parameters(), 0.5).clip_norm()
            self.optimizer.step()
        return loss

    def plain(self, numbers: range) -> None:
        for number in numbers:
            self.take(number)
            self.optimizer.zero_grad()
            self.losses.append(self.step().item())

    def captured(self, numbers: range) -> None:
        graph = torch.hpu.HPUGraph()
        self.take(numbers[0])
        self.optimizer.zero_grad()
        with torch.hpu.graph(graph):
            loss = self.step()
        self.losses.append(loss.item())
        for number in numbers[1:]:
            self.take(number)
            self.optimizer.zero_grad()  # as scripts go on to do
            graph.replay()
            self.losses.append(loss.item())

    def found(self) -> list[torch.Tensor]:
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        states = [each for state in self.optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
        return [torch.tensor(self.losses), *self.model.state_dict().values(), *gradients, *states]


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, 0.1, momentum=0.9, foreach=False)


OPTIMIZERS = {
    "sgd": sgd,
    "adamw fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "FusedLars": lambda params: FusedLars(torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1), [1] * len(params)),
}


@pytest.mark.parametrize(("name", "policy"), [("sgd", None), ("adamw fused", "autocast"), ("FusedLars", "habana")])
def test_replays_are_steps_bit_for_bit(name: str, policy: str | None) -> None:
    tasks = Task(OPTIMIZERS[name]), Task(OPTIMIZERS[name])
    for task, rest in zip(tasks, (Task.plain, Task.captured), strict=True):
        torch.manual_seed(1)
        with hmp.casts(policy) if policy else contextlib.nullcontext():
            task.plain(range(1))  # makes the optimizer's state, and fills the caches
            rest(task, range(1, 4))
        task.losses.append(torch.rand(()).item())  # as many random numbers were drawn
    expected, found = (task.found() for task in tasks)
    assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)


def test_casts_outside_see_the_weights_that_a_replay_has_written() -> None:
    task = Task(sgd)
    with hmp.convert(opt_level="O1"), torch.no_grad():
        for _ in range(3):  # whose casts are kept
            before = task.model.outer(task.x)
        with torch.enable_grad():
            task.plain(range(1))
            task.captured(range(1, 4))
        for _ in range(2):
            after = task.model.outer(task.x)
            exact = functional.linear(*(each.bfloat16() for each in (task.x, task.model.outer.weight, task.model.outer.bias)))
            assert torch.equal(after, exact) and not torch.equal(after, before)


def test_gradients_are_made_anew_or_added_to_as_in_the_step() -> None:
    for zeroed in (True, False):
        weight, x = nn.Parameter(torch.ones(2)), torch.tensor([1.0, 2.0])
        weight.grad = None if zeroed else torch.zeros(2)
        graph = torch.hpu.HPUGraph()
        with torch.hpu.graph(graph):
            (weight * x).sum().backward()
        x.fill_(5)
        weight.grad = None if zeroed else weight.grad
        graph.replay()
        assert weight.grad.tolist() == ([5, 5] if zeroed else [6, 7])
        weight.grad = torch.zeros(2)
        with pytest.raises(hmp.HmpError, match=r"got another tensor, .*; call zero_grad\(\) first"):
            graph.replay()


def checkpointed() -> nn.Module:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    return Checkpointed()


def moves(weight: torch.Tensor) -> None:
    weight.data = weight.data * 2


VALUES = "values to Python"
REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), VALUES),
    "numpy": (lambda x: x.numpy(), VALUES),
    "lengths": (lambda x: nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 1])), VALUES),
    "mask": (lambda x: x[x > 0], "depends on values"),
    "sparse": (lambda x: x.to_sparse(), "depends on values|layout"),
    "seeded": (lambda x: (torch.manual_seed(0), functional.dropout(x)), "seeded in the capture"),
    "generator": (lambda x: torch.rand(2, generator=torch.Generator().manual_seed(0)), "expected torch's default generator"),
    "moved": (moves, "was replaced in the capture"),
    "made and moved": (lambda x: moves(x + 1), "was replaced in the capture"),
    "subclass": (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged) * 2, "got a NestedTensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_replay_cannot_do_is_an_error_at_the_capture(name: str) -> None:
    step, words = REFUSED[name]
    graph = torch.hpu.HPUGraph()
    x = torch.rand(2, 2, 2)
    with pytest.raises(hmp.HmpError, match=words), torch.hpu.graph(graph):
        step(x)
    with pytest.raises(hmp.HmpError, match="expected a captured step, got none"):
        graph.replay()
    assert torch.rand(2).tolist()  # may be read again


STEPS: dict[str, tuple[Callable[[Any], Any], Any, int, str]] = {
    "first step": (sgd, Model, 0, "expected SGD.step() to change its state in place"),
    "a count that is read": (lambda params: torch.optim.AdamW(params, foreach=True), Model, 1, "use fused=True"),
    "a count in Python": (lambda params: FusedLamb(params, 0.01), Model, 1, "FusedLamb counts its steps in Python"),
    "a checkpoint with dropout": (sgd, checkpointed, 1, "seeded in the capture (gradient checkpointing"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_a_replay_would_not_repeat_is_an_error_at_the_capture(name: str) -> None:
    optimizer, model, before, words = STEPS[name]
    task = Task(optimizer, model)
    task.plain(range(before))
    with pytest.raises(hmp.HmpError) as caught:
        task.captured(range(before, 3))
    assert words in str(caught.value)


def test_what_has_changed_since_the_capture_is_an_error_at_the_replay() -> None:
    task, graph = Task(sgd), torch.hpu.HPUGraph()
    scheduler = torch.optim.lr_scheduler.StepLR(task.optimizer, 1, 0.5)
    task.plain(range(1))
    with torch.hpu.graph(graph):
        task.step()
    scheduler.step()
    with pytest.raises(hmp.HmpError, match=r"expected SGD with lr=0.1 as in the capture, got 0.05"):
        graph.replay()
    task.optimizer.param_groups[0]["lr"] = 0.1
    graph.replay()
    task.model.double()
    with pytest.raises(hmp.HmpError, match="was replaced since the capture"):
        graph.replay()
