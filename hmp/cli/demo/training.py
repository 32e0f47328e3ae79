"""One model trained in one precision on scikit-learn's handwritten digits: its accuracy, its step time, and what one more step did."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import hmp

from ...benchmark.timing import seconds_of
from .models import DemoModel
from .step_report import StepObserver, StepReport

_BATCH = 64
_WARM_UP = 0.2  # share of the steps in which the learning rate rises
_TEST_SIZE = 597  # of 1797: one picture is a sixth of a percentage point
_SPLIT_SEED = 0
POLICY = "habana"


@dataclass(frozen=True)
class Digits:
    """1200 pictures to train on and 597 to test on: float32 (N, 1, 8, 8) in 0..1, and int64 labels (N,)."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def digits() -> Digits:
    """Return the digits, split the same way at every call."""
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    test, train = order[:_TEST_SIZE], order[_TEST_SIZE:]
    return Digits(images[train], labels[train], images[test], labels[test])


@dataclass(frozen=True)
class Precision:
    """A name for the table, and makers of the two contexts."""

    name: str
    around_training: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext


FLOAT32 = Precision("float32")
AUTOCAST = Precision("torch.autocast", around_forward=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
# Process-wide, as the call was published: backward and the optimizer's step run inside it too.
HMP = Precision(f"hmp {POLICY}", around_training=lambda: hmp.convert(policy=POLICY))
PRECISIONS = (FLOAT32, AUTOCAST, HMP)


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    model: str
    precision: str
    accuracy: float | None  # percent of the test pictures; None if the model was not trained to the end
    step_seconds: float  # median of the training steps
    step: StepReport


def steps(data: Digits, epochs: int) -> int:
    """Return the number of training steps in so many epochs; an incomplete last batch is left out."""
    return epochs * (len(data.train_images) // _BATCH)


def train(
    name: str,
    make: type[DemoModel],
    data: Digits,
    precision: Precision,
    *,
    epochs: int,
    seed: int,
    most_steps: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:
    """Return what came of training one model in one precision; the same seed gives the same weights and batches.

    After ``most_steps`` training ends: what a step takes and does is known then, and the accuracy is not.
    """
    torch.manual_seed(seed)
    with precision.around_training():
        trainee = _Trainee(make(), precision, steps(data, epochs))
        seconds = []
        for images, labels in islice(_batches(data, epochs), most_steps):
            seconds.append(seconds_of(partial(trainee.step, images, labels), 1, images.device)[0])
            advance()
        is_trained = len(seconds) == steps(data, epochs)
        accuracy = trainee.accuracy(data.test_images, data.test_labels) if is_trained else None
        step = trainee.observe(data.train_images[:_BATCH], data.train_labels[:_BATCH])
    return Outcome(name, precision.name, accuracy, statistics.median(seconds), step)


def _batches(data: Digits, epochs: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the pictures and labels of each step; an incomplete last batch of an epoch is left out."""
    for _ in range(epochs):
        for batch in torch.randperm(len(data.train_images)).split(_BATCH):
            if len(batch) == _BATCH:
                yield data.train_images[batch], data.train_labels[batch]


def step_seconds(make: type[DemoModel], data: Digits, precision: Precision) -> float:
    """Return how long a training step takes: the second, as the first sets up."""
    with precision.around_training():
        trainee = _Trainee(make(), precision, steps(data, 1))
        images, labels = data.train_images[:_BATCH], data.train_labels[:_BATCH]
        return min(seconds_of(partial(trainee.step, images, labels), 1, images.device)[0] for _ in range(2))


class _Trainee:
    def __init__(self, model: DemoModel, precision: Precision, total_steps: int) -> None:
        self.model = model
        self.forward_context = precision.around_forward
        peak = model.peak_learning_rate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, peak, total_steps=total_steps, pct_start=_WARM_UP)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._update(images, labels)
        self.schedule.step()

    def observe(self, images: torch.Tensor, labels: torch.Tensor) -> StepReport:
        observer = StepObserver(self.model)
        self._update(images, labels, observer.saving)
        with observer.dispatched():
            self._update(images, labels, observer.forward)
        return observer.report()

    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        self.model.eval()
        with torch.no_grad(), self.forward_context():
            right = int((self.model(images).argmax(1) == labels).sum())
        return 100.0 * right / len(labels)

    def _update(
        self, images: torch.Tensor, labels: torch.Tensor, around_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        with around_forward(), self.forward_context():
            loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
