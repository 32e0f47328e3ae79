"""The user's task: train or evaluate from the same state and seed under any policy, and say how it went."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...core.active.regions import disable_casts
from ...core.casting import each_tensor
from ...core.observe import listen
from ...core.policy.policy import Policy
from ...core.torch_patches.module_calls import applied_policy
from ...errors import HmpError
from ..benchmark import check_numbers, policy_active, seconds_of
from ..model_call import compiled_in
from ..model_state import Snapshot, random_state_kept, seed_all
from ..saved_activations import SavedActivations

MOST_BATCHES = 1_000
LEAST_STEPS = 20
_TIMED_SECONDS = 0.15


@dataclass(frozen=True)
class Outcome:
    """What came of one policy: mean loss, metric, seconds and saved bytes of a step, as far as it ran."""

    loss: float = math.nan
    metric: float | None = None
    seconds: float = math.nan
    saved_bytes: int = 0
    failure: str = ""


class Task:
    """Model, batches and loss, and how they are run. Raise HmpError for what cannot be run."""

    def __init__(
        self,
        model: torch.nn.Module,
        batches: Iterable[Any],
        loss: Callable[[Any, Any], Any],
        metric: Callable[[Any], Any] | None,
        optimizer: Callable[[Any], Any] | None,
        steps: int | None,
        seed: int,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise HmpError(f"tune(): expected a torch.nn.Module, got {type(model).__name__}; pass the model itself")
        applied = applied_policy(model)
        if applied is not None:
            raise HmpError(f"policy {applied.name!r} is applied to the model and would override tune(); call hmp.remove(model) first")
        if any(compiled_in(module) is not None for module in model.modules()):
            raise HmpError("the model is compiled; pass one that isn't, and compile it after hmp.apply(model, the result's policy)")
        for name, given in (("loss", loss), ("metric", metric), ("optimizer", optimizer)):
            if given is not None and not callable(given):
                raise HmpError(f"{name}= expected a function, got {type(given).__name__}")
        if any(map(torch.nn.parameter.is_lazy, itertools.chain(model.parameters(), model.buffers()))):
            raise HmpError("the model has lazy parameters without shapes; call it once before tune()")
        if not isinstance(batches, Iterable):
            raise HmpError(f"batches= expected an iterable, such as a list or a DataLoader, got {type(batches).__name__}")
        first = next(itertools.chain(model.parameters(), model.buffers()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.model = model
        with random_state_kept(self.device):  # a DataLoader draws
            self.batches = list(itertools.islice(batches, MOST_BATCHES))
        if not self.batches:
            raise HmpError("batches= expected at least one batch, got none")
        check_numbers(steps=steps)
        self._loss, self._metric, self._optimizer = loss, metric, optimizer
        self.trains = optimizer is not None
        self.steps = steps or max(len(self.batches), LEAST_STEPS)
        self.seed = seed
        self._snapshot = Snapshot(model, None, (), None)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Make a context after which model and random state are as they were."""
        with random_state_kept(self.device):
            try:
                self._made_optimizer()  # what cannot be one is said before anything runs
                yield
            finally:
                self._snapshot.restore()

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the user's loss of one batch, of a mapping a copy: losses take out entries. Raise HmpError if it isn't a scalar tensor."""
        return scalar(self._loss(self.model, copy.copy(batch) if isinstance(batch, Mapping) else batch), HmpError)

    def batch_versions(self) -> list[int]:
        """Return how often each tensor of the batches was written to."""
        return [tensor._version for tensor in each_tensor(self.batches) if not tensor.is_inference()]

    def from_the_start(self) -> None:
        """Put model and random state where every run begins."""
        self._snapshot.restore()
        seed_all(self.seed)
        self.model.zero_grad()

    def run(self, policy: Policy | None) -> Outcome:
        """Return what comes of training or evaluating under `policy`, None for float32. A run whose loss is not finite ends there."""
        with self.under(policy):
            why, saved = self._look()
            if why:
                return Outcome(saved_bytes=saved, failure=why)
            self.from_the_start()
            loss, seconds = self._steps()
            if not math.isfinite(loss):
                return Outcome(loss, None, seconds, saved, "the loss is not finite")
            metric = None
            if self._metric is not None:
                metric = _number(self._metric(self.model))
            return Outcome(loss, metric, seconds, saved)

    def under(self, policy: Policy | None) -> AbstractContextManager[Any]:
        """Make a context in which `policy` is active for the process, None for no casts."""
        return disable_casts() if policy is None else policy_active(policy, self.model)

    def timed(self, policy: Policy | None, about: float) -> float:
        """Return the seconds of a step under `policy`, which takes `about` so many: the mean of a few, after a first one."""
        self.from_the_start()  # no further into training than the trial was: there it may diverge
        optimizer, batches = self._made_optimizer(), itertools.cycle(self.batches)
        count = max(min(math.ceil(_TIMED_SECONDS / max(about, 1e-9)), self.steps - 1), 1)
        with self.under(policy):
            self._step(next(batches), optimizer)
            seconds, _ = seconds_of(lambda: [self._step(next(batches), optimizer) for _ in range(count)])
        return seconds / count

    def _made_optimizer(self) -> Any:
        """Return a new optimizer over the model's parameters, None where the task does not train."""
        make = self._optimizer
        if make is None:
            return None
        try:
            return stepping(make(self.model), HmpError)
        except TypeError as error:
            raise HmpError(f"optimizer(model) raised {error}; give lambda model: torch.optim.SGD(model.parameters())") from error

    def _step(self, batch: Any, optimizer: Any) -> torch.Tensor:
        (self.model if optimizer is None else optimizer).zero_grad()
        loss = self.loss(batch)
        if loss.requires_grad:
            loss.backward()
        elif optimizer is not None:
            raise HmpError(
                "expected loss(model, batch) to require grad, because optimizer= is given; leave optimizer= out to only evaluate"
            )
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    def _look(self) -> tuple[str, int]:
        """Return what isn't finite on the first batch, the loss or a gradient, and the bytes that it saves for backward."""
        self.from_the_start()
        saved = SavedActivations(self._snapshot.tensors)
        with listen(saved):
            loss = self.loss(self.batches[0])
        if loss.requires_grad:
            loss.backward()
        if not bool(loss.isfinite()):
            return "the loss is not finite", saved.bytes
        gradients = (p.grad.to_dense() for p in self.model.parameters() if p.grad is not None)
        return "" if all(bool(each.isfinite().all()) for each in gradients) else "the gradient is not finite", saved.bytes

    def _steps(self) -> tuple[float, float]:
        """Return the mean loss of the last pass over the batches, and the median seconds of a step."""
        optimizer = self._made_optimizer()
        losses, seconds = [], []
        for at in range(self.steps if self.trains else len(self.batches)):
            took, loss = seconds_of(partial(self._step, self.batches[at % len(self.batches)], optimizer))
            seconds.append(took)
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                return losses[-1], statistics.median(seconds)
        last = losses[-min(len(self.batches), max(self.steps // 2, 1)) :] if self.trains else losses
        return statistics.fmean(last), statistics.median(seconds[1:] or seconds)


def _number(found: Any) -> float:
    """Return what metric(model) returned, as a number. Raise HmpError for anything else."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        kind = type(found).__name__
        raise HmpError(f"expected metric(model) to return a number (larger is better), such as an accuracy, got {kind}") from None


def scalar(loss: Any, error: Callable[[str], HmpError]) -> torch.Tensor:
    """Return what loss(model, batch) returned, a tensor with one element. Raise `error` of what it is instead, and of the remedy."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"an object of type {type(loss).__name__}"
    raise error(f"loss(model, batch) returned {what}; return a scalar tensor, such as its .mean()")


def stepping(optimizer: Any, error: Callable[[str], HmpError]) -> Any:
    """Return what optimizer(model) returned, which can step. Raise `error` of what it is instead, and of the remedy."""
    if all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
        return optimizer
    raise error(f"optimizer(model) returned an object of type {type(optimizer).__name__}; return a torch.optim.Optimizer")
