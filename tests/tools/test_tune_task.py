"""The user's task as tune() runs it: every run begins alike, and model, batches and random state are afterwards as they were."""

from __future__ import annotations

import copy
import math
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import hmp
from torch_has import SAVED_TENSORS_HOOKS
from tune_kit import perceptron, sgd, squared, trained

START = hmp.Policy("start", bf16={"linear"}, fp32={"softmax"})


def tuned(model: nn.Module, batches: Any, loss: Any = squared, **options: Any) -> Any:
    given = {"optimizer": sgd, "objective": "memory", "steps": 2, "max_trials": 3, "start": START, "ops": ["linear"]}
    return hmp.tune(model, batches, loss=loss, **given | options)


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


class Noting(nn.Module):
    """A table for the longest input so far, an average, a count and a hook in plain attributes; and buffers that are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.longest, self.average, self.total, self.hooked = nn.Linear(8, 8), 0, torch.zeros(8), torch.zeros(8), False
        self.register_buffer("table", torch.zeros(0, 8))
        self.register_buffer("none", None)
        self.register_buffer("counts", torch.zeros(1), persistent=False)
        self.alias = self.counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts += 1
        self.none = x.mean(0)
        if len(x) > self.longest:
            self.longest = len(x)
            self.register_buffer("table", torch.full((len(x), 8), 0.5))
            self.register_buffer("made", torch.ones(8))
        if not self.hooked:
            self.out.register_forward_hook(lambda module, args, result: result * 2)
            self.hooked, self.first = True, x.detach()
        y = self.out(x) + self.table[: len(x)]
        self.average = 0.9 * self.average + y.detach().float().mean(0)
        self.total += y.detach().float().mean(0)
        return y + self.average.to(y.dtype)


class Remembering(nn.Module):
    """What it saw before, in lists and dicts that are changed in place and decide what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.lengths: list[int] = []
        self.sums = {"all": torch.zeros(8), "by length": {}}
        self.kinds, self.latest, self.pair = set(), deque(maxlen=2), ([], torch.zeros(8))
        self.itself = [self.lengths]
        self.itself.append(self.itself)
        self.acts = [torch.relu]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.acts[0](self.out(x)) + len(self.lengths) + len(self.kinds) + self.pair[1] + sum(self.latest)
        self.lengths.append(len(x))
        self.sums["all"] += y.detach().float().mean(0)
        self.sums["by length"][len(x)] = self.sums["all"].clone()
        self.kinds.add(len(self.lengths) % 3)
        self.latest.append(0.5 * len(self.lengths))
        self.pair[0].append(1)
        self.pair[1].add_(0.1)
        return y


def test_every_run_begins_with_what_lists_and_dicts_in_attributes_held() -> None:
    torch.manual_seed(0)
    model, batches = Remembering(), [torch.randn(4, 8) for _ in range(3)]
    model(batches[0])
    twin, held = copy.deepcopy(model), dict(vars(model))
    wanted = trained(copy.deepcopy(model), batches, squares, 6, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    result = tuned(model, batches, squares, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), steps=6)
    assert [trial.loss for trial in result.trials if not trial.lists] == pytest.approx([wanted] * 2)
    assert all(vars(model)[name] is value for name, value in held.items() if isinstance(value, (list, dict, set, deque, tuple)))
    assert (model.lengths, model.kinds, list(model.latest), model.pair[0]) == ([4], {1}, [0.5], [1])
    assert model.itself[0] is model.lengths and model.itself[1] is model.itself and model.latest.maxlen == 2
    assert torch.equal(model.sums["all"], twin.sums["all"]) and model.sums["by length"].keys() == {4}
    assert torch.equal(model(batches[0]), twin(batches[0]))


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model.out.bias.requires_grad_(False)
    return torch.optim.SGD([model.out.weight], lr=0.1)


def test_every_run_begins_with_the_attributes_the_hooks_and_what_is_trained_as_they_were() -> None:
    torch.manual_seed(0)
    model = Noting()
    twin, batches = copy.deepcopy(model), [torch.randn(4, 8) for _ in range(3)]
    wanted = trained(copy.deepcopy(model), batches, squares, 6, frozen)
    total = model.total
    result = tuned(model, batches, squares, optimizer=frozen, steps=6)
    assert [trial.loss for trial in result.trials if not trial.lists] == pytest.approx([wanted] * 2)
    assert vars(model).keys() == vars(twin).keys() and model.total is total
    assert (model.longest, model.hooked, len(model.out._forward_hooks)) == (0, False, 0)
    assert not model.average.any() and not model.total.any() and model.table.shape == (0, 8)
    assert model.none is None and model.counts is model.alias and float(model.counts) == 0.0
    assert model.state_dict().keys() == twin.state_dict().keys()
    assert model.out.bias.requires_grad
    assert torch.equal(model(batches[0]), twin(batches[0]))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def test_a_loss_that_takes_its_batch_apart_finds_it_whole_each_time() -> None:
    seen = []

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        x = batch.pop("x") * batch.pop("scale")
        seen.append(float(x.abs().sum()))
        return squared(model, x)

    model, batches = perceptron()
    given = [{"x": x, "scale": 2.0} for x in batches]
    before = copy.deepcopy(given)
    tuned(model, given, loss, steps=len(batches))
    assert len(set(seen)) == len(batches)
    for was, now in zip(before, given, strict=True):
        assert now["scale"] == 2.0
        assert torch.equal(was["x"], now["x"])


def test_random_state_is_kept_where_the_batches_draw() -> None:
    model, batches = perceptron()
    loader = torch.utils.data.DataLoader(torch.cat(batches), batch_size=32, shuffle=True)
    before = torch.get_rng_state()
    result = tuned(model, loader, tolerance=0.5)
    assert result.best.fits and torch.equal(before, torch.get_rng_state())


def test_gradients_of_a_sparse_embedding_are_looked_at() -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8)), [torch.randint(0, 20, (4, 5)) for _ in range(2)]
    assert tuned(model, batches, squares, tolerance=0.1).best.fits
    model[0].weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(hmp.HmpError, match="the gradient is not finite"):
        tuned(model, batches, squares, tolerance=0.1)


def test_lists_that_somebody_wrote_are_not_replaced(tmp_path: Any) -> None:
    hmp.Policy(bf16={"linear"}).save(tmp_path)
    model, batches = perceptron()
    with pytest.raises(hmp.HmpError, match="did not write"):
        tuned(model, batches, start=tmp_path, folder=tmp_path)
    assert hmp.Policy.load(tmp_path) == hmp.Policy(bf16={"linear"})


@pytest.mark.skipif(not SAVED_TENSORS_HOOKS, reason="before torch 2.9 transforms refuse to run where something is counted")
def test_a_model_with_a_transform_inside_is_tuned_for_time_and_for_memory() -> None:
    """torch lets nobody see what is kept for backward in the transform, and before 2.9 not around it either."""
    model, batches = torch.nn.Linear(4, 4), [torch.ones(2, 4)]

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: torch.tanh(y).sum())(x)
        return (model(x) * slope).square().mean()

    arguments = {"loss": loss, "optimizer": sgd, "steps": 3, "max_trials": 2, "start": START}
    assert hmp.tune(model, batches, **arguments).best.fits
    if SAVED_TENSORS_HOOKS:
        assert hmp.tune(model, batches, **arguments, objective="memory").best.fits
        return
    with pytest.raises(hmp.HmpError, match="a step saves nothing for backward, or torch does not report it"):
        hmp.tune(model, batches, **arguments, objective="memory")
