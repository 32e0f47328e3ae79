"""The replay of an HPUGraph: the captured calls of torch's kernels, made again into the same tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ... import HmpError
from ...core import copies
from ...core.casting import each_tensor, map_tensors


def place(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory, 0 for none."""
    return tensor.untyped_storage().data_ptr()


def same_memory(value: Any) -> Any:
    """Return the value with new tensors on the same memory, which no later `squeeze_()` or `.data =` changes."""
    return map_tensors(value, torch.ops.aten.alias)


@dataclasses.dataclass(frozen=True)
class RecordedKernel:
    """A kernel, its arguments, and the memory of its results: None for a result in the memory of an argument."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor | None, ...]
    in_inference_mode: bool

    def again(self) -> None:
        """Make the call and copy its results to those of the captured call."""
        with torch.inference_mode(self.in_inference_mode):
            for new, held in zip(each_tensor((self.kernel(*self.args, **self.kwargs),)), self.results, strict=True):
                if held is None:
                    continue
                if new.shape != held.shape:
                    raise HmpError(
                        f"HPUGraph.replay(): {self.kernel} expected to return shape {tuple(held.shape)} as in the capture, got "
                        f"{tuple(new.shape)}: a shape that depends on values cannot be replayed; leave that part out of the graph"
                    )
                held.copy_(new)


class Tensors:
    """The tensors of a step: those made in the capture, and those from before, `outside`.

    If a program replaces the memory of one (`.data =`, `model.to(dtype)`), a replay would read and write the old memory.
    """

    def __init__(self) -> None:
        self._outside: dict[int, tuple[torch.Tensor, int]] = {}
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self._written: dict[int, torch.Tensor] = {}
        self._gradients_before: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._new_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._added_to: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor, is_made: bool) -> None:
        """Store the address of the tensor, and the gradient of one from outside."""
        if id(tensor) in self._outside or id(tensor) in self._made:
            return
        (self._made if is_made else self._outside)[id(tensor)] = tensor, place(tensor)
        if not is_made and tensor.requires_grad and tensor.is_leaf:
            self._gradients_before[id(tensor)] = tensor.grad, _version(tensor.grad)

    def write(self, tensor: torch.Tensor) -> None:
        """Store that the step writes to the tensor."""
        if not tensor.is_inference():
            self._written[id(tensor)] = tensor

    def close(self) -> None:
        """Store which gradients the step made or added to. Raise HmpError if a tensor's memory was replaced."""
        for each, (before, version) in self._gradients_before.items():
            tensor = self._outside[each][0]
            now = tensor.grad
            if now is not None and now is not before:
                self._new_gradients.append((tensor, now))
            elif now is not None and _version(now) != version:
                self._added_to.append((tensor, now))
        _check_places((*self._made.values(), *self._outside.values()), "in the capture")
        self._made.clear()

    def check(self) -> None:
        """Raise HmpError if a replay would not use the tensors that the program has now."""
        _check_places(self._outside.values(), "since the capture")
        new = [each for each in self._new_gradients if each[0].grad is not None]
        if any(tensor.grad is not gradient for tensor, gradient in (*new, *self._added_to)):
            raise HmpError(
                "HPUGraph.replay(): expected each .grad to be None or the tensor that it was after the capture, got another tensor, which "
                "a replay would not write to; call zero_grad() first, or zero_grad(set_to_none=False) if the captured step accumulates "
                "into existing gradients"
            )

    def replayed(self) -> None:
        """Increment the versions of the written tensors, and restore gradients that the program has set to None."""
        torch.autograd.graph.increment_version(list(self._written.values()))
        for tensor, gradient in self._new_gradients:
            tensor.grad = gradient


def _check_places(tensors: Iterable[tuple[torch.Tensor, int]], when: str) -> None:
    for tensor, was in tensors:
        if place(tensor) != was:
            raise HmpError(
                f"HPUGraph: expected the tensors of the step to keep their memory, but that of one of shape {tuple(tensor.shape)} was "
                f"replaced {when}; change tensors in place (copy_()), and capture again after moving or casting a model"
            )


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


class OptimizerSteps:
    """The state and settings of optimizers that a replay does not change, because it runs none of their Python."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}
        self._seen: dict[int, tuple[torch.optim.Optimizer, Any]] = {}

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer's state before a step."""
        self._before[id(optimizer)] = _settings(optimizer), _state(optimizer)

    def ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise HmpError if the step has changed something that a replay would not."""
        settings, state = self._before.pop(id(optimizer))
        name = type(optimizer).__name__
        if _state(optimizer) != state:
            raise HmpError(
                f"HPUGraph: expected {name}.step() to change its state in place, but it created or replaced state tensors; make one step "
                "before the capture, and if that does not help, call step() after replay()"
            )
        if _settings(optimizer) != settings:
            raise HmpError(
                f"HPUGraph: {name} counts its steps in Python, which a replay does not run; call step() after replay(), or use an "
                "optimizer that counts in a tensor, such as FusedAdamW"
            )
        self._seen[id(optimizer)] = optimizer, None

    def close(self) -> None:
        """Store the settings at the end of the capture: LARS sets the weight decay to 0 during its step."""
        self._seen = {each: (optimizer, _settings(optimizer)) for each, (optimizer, _) in self._seen.items()}

    def check(self) -> None:
        """Raise HmpError if a number, such as the learning rate, is no longer that of the capture."""
        for optimizer, settings in self._seen.values():
            for before, now in zip(settings, _settings(optimizer), strict=True):
                for name, value in before.items():
                    if now.get(name) != value:
                        raise HmpError(
                            f"HPUGraph.replay(): expected {type(optimizer).__name__} with {name}={value} as in the capture, got "
                            f"{now.get(name)}, which a replay does not use; call step() after replay(), or capture again"
                        )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: _comparable(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _state(optimizer: torch.optim.Optimizer) -> Any:
    return {id(param): {name: _comparable(value) for name, value in state.items()} for param, state in optimizer.state.items()}


def _comparable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_comparable(each) for each in value]
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured step."""

    calls: list[RecordedKernel]
    tensors: Tensors
    optimizers: OptimizerSteps

    def replay(self) -> None:
        """Make all calls again, in order."""
        self.tensors.check()
        self.optimizers.check()
        # the casts of torch.autocast are captured calls
        with torch.no_grad(), torch._C._DisableAutocast():
            for call in self.calls:
                call.again()
        self.tensors.replayed()
        torch.clear_autocast_cache()  # copies of weights, torch's and hmp's, are older than what the replay wrote
        copies.wrote()
