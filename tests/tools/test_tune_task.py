"""The user's task as tune() runs it, and what it refuses: runs begin alike; model, batches and random state are as they were."""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import hmp
from compile_kit import BRIDGED
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


@pytest.mark.skipif(not SAVED_TENSORS_HOOKS, reason="before torch 2.9 transforms refuse to run where something is counted")
def test_a_model_with_a_transform_inside_is_tuned_for_time_and_for_memory() -> None:
    """torch lets nobody see what is kept for backward in the transform, and before 2.9 not around it either."""
    model, batches = torch.nn.Linear(4, 4), [torch.ones(2, 4)]

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: torch.tanh(y).sum())(x)
        return (model(x) * slope).square().mean()

    arguments = {"loss": loss, "optimizer": sgd, "steps": 3, "max_trials": 2, "start": START}
    assert hmp.tune(model, batches, **arguments).best.fits
    assert hmp.tune(model, batches, **arguments, objective="memory").best.fits


LINEAR = hmp.Policy("products", bf16={"linear"})
# what is given otherwise, and what the error names
REFUSED = [
    ({"model": 3}, "int"),
    ({"batches": []}, "at least one batch, got none"),
    ({"batches": 3}, "such as a list or a DataLoader, got int"),
    ({"loss": 3}, "loss="),
    ({"loss": lambda model, x: model(x)}, "shape (32, 8)"),
    ({"tolerance": -1}, "tolerance=-1"),
    ({"tolerance": {"los": 1}}, "'los'"),
    ({"tolerance": {"metric": 0.1}}, "metric="),
    ({"tolerance": {"gradient": 0.9}}, "'gradient'"),
    ({"seconds": "10 min"}, "seconds='10 min'"),
    ({"seconds": 0}, "seconds=0"),
    ({"max_trials": 0.5}, "max_trials=0.5"),
    ({"progress": "bar"}, "progress='bar'"),
    ({"loss": lambda m, x: squared(m, x.add_(1.0))}, "writes into the batch's tensors"),
    ({"objective": "joy"}, "'joy'"),
    ({"ops": []}, "ops=[]"),
    ({"ops": ["liner"]}, "'liner'"),
    ({"steps": 0}, "steps=0"),
    ({"start": "nowhere"}, "'nowhere'"),
    ({"optimizer": lambda model: None}, "optimizer(model) returned an object of type NoneType"),
    ({"optimizer": torch.optim.SGD}, "lambda model: torch.optim.SGD(model.parameters())"),
    ({"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}, "lambda model: torch.optim.SGD(model.parameters())"),
    ({"metric": lambda model: "x"}, "such as an accuracy, got str"),
    ({"model": nn.LazyLinear(8)}, "call it once"),
    ({"loss": torch.no_grad()(squared)}, "to require grad"),
    ({"loss": lambda m, x: m(x).sum() * float("nan")}, "the loss is not finite"),
    ({"loss": lambda m, x: (m(x) * 0).sum().sqrt()}, "the gradient is not finite"),
    ({"model": nn.Linear(16, 8).requires_grad_(False), "optimizer": None}, 'objective="time"'),
    ({"start": hmp.Policy("mine", bf16={"softmax @ norm"})}, "entries with a scope"),
    ({"start": "saved8", "objective": "bytes"}, "kind 'saved'"),
    ({"levels": "fp8"}, "got 'fp8'"),
    ({"levels": ("fp8", "fp32")}, "got ('fp8', 'fp32')"),
    ({"start": hmp.Policy("mine", fp8={"linear"}), "levels": ("fp8", "bf16", "fp32")}, "kind 'fp8'"),
    ({"start": "fp8", "levels": ("bf16", "fp32")}, "kind 'fp8'"),
]


def test_what_cannot_be_searched_is_refused() -> None:
    model, batches = perceptron()
    for changes, told in REFUSED:
        given = {"model": model, "batches": batches, "loss": squared, "optimizer": sgd, "objective": "memory", "steps": 3, **changes}
        with pytest.raises(hmp.HmpError) as caught:
            hmp.tune(given.pop("model"), given.pop("batches"), **given)
        assert told in str(caught.value), changes
        assert not hmp.is_converted()
    hmp.apply(model, "bert")
    with pytest.raises(hmp.HmpError, match=r"'bert' is applied .*hmp\.remove"):
        hmp.tune(model, batches, loss=squared)


def test_an_op_that_raises_in_the_low_dtype_is_a_trial_that_failed() -> None:
    torch.manual_seed(0)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if y.dtype is not torch.float32:
            raise ValueError("only float32 here")
        return y.square().mean()

    result = hmp.tune(torch.nn.Linear(4, 4), [torch.ones(2, 4)], loss=loss, optimizer=sgd, steps=3, objective="memory", start=LINEAR)
    start = result[LINEAR.name]
    assert not start.fits
    assert start.why == "ValueError: only float32 here"
    assert "linear" in result.policy.fp32


@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_refused() -> None:
    """Beyond torch's limit of recompilations it would run uncompiled, and the time of a step would be that of another program."""
    with pytest.raises(hmp.HmpError, match="the model is compiled; pass one that isn't"):
        hmp.tune(torch.compile(nn.Linear(16, 8), backend="eager"), perceptron()[1], loss=squared)
