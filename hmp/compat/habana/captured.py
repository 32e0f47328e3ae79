"""What a captured graph holds: calls of torch's kernels with their tensors, which are made again into the same tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ... import HmpError
from ...core.casting import each_tensor, map_tensors


def place(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; 0 for none."""
    return tensor.untyped_storage().data_ptr()


def same_memory(value: Any) -> Any:
    """What a kernel takes or gives, with other tensors on the same memory: no later `squeeze_()` or `.data =` changes these."""
    return map_tensors(value, torch.ops.aten.alias)


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel, what it takes, and the memory that holds its results: None for a result in memory of what it takes."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor | None, ...]
    in_inference_mode: bool

    def again(self) -> None:
        """Makes the call, and writes what it gives where the first one's results are."""
        with torch.inference_mode(self.in_inference_mode):
            for new, held in zip(each_tensor((self.kernel(*self.args, **self.kwargs),)), self.results, strict=True):
                if held is None:
                    continue
                if new.shape != held.shape:
                    raise HmpError(
                        f"HPUGraph.replay(): {self.kernel} gives {tuple(new.shape)}, and gave {tuple(held.shape)} when it was captured: a "
                        "shape that follows from values cannot be replayed; leave that part of the step out of the graph"
                    )
                held.copy_(new)


class Tensors:
    """The tensors of a step, those of the capture's own making apart from those that were there before, `outside`.

    A program that exchanges the memory of one (`.data =`, `model.to(dtype)`) would have the replay read and write the old memory.
    """

    def __init__(self) -> None:
        self._outside: dict[int, tuple[torch.Tensor, int]] = {}
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self._written: dict[int, torch.Tensor] = {}
        self._gradients_before: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._new_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._added_to: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor, is_made: bool) -> None:
        """Notes where the tensor is, and the gradient that one from outside has."""
        if id(tensor) in self._outside or id(tensor) in self._made:
            return
        (self._made if is_made else self._outside)[id(tensor)] = tensor, place(tensor)
        if not is_made and tensor.requires_grad and tensor.is_leaf:
            self._gradients_before[id(tensor)] = tensor.grad, _version(tensor.grad)

    def write(self, tensor: torch.Tensor) -> None:
        """Notes that the step writes to the tensor."""
        if not tensor.is_inference():
            self._written[id(tensor)] = tensor

    def close(self) -> None:
        """Notes which gradients the step made, and which it added to. HmpError where a tensor has other memory than when it was noted."""
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
        """HmpError where a replay would not meet the tensors that the program has now."""
        _check_places(self._outside.values(), "since the capture")
        new = [each for each in self._new_gradients if each[0].grad is not None]
        if any(tensor.grad is not gradient for tensor, gradient in (*new, *self._added_to)):
            raise HmpError(
                "HPUGraph.replay(): a gradient is another tensor than after the capture, which the replay would not touch; call "
                "zero_grad() first, and where the captured step adds to gradients that were there, zero_grad(set_to_none=False)"
            )

    def replayed(self) -> None:
        """Counts what was written to as written, and gives gradients back that the program has set to None."""
        torch.autograd.graph.increment_version(list(self._written.values()))
        for tensor, gradient in self._new_gradients:
            tensor.grad = gradient


def _check_places(tensors: Iterable[tuple[torch.Tensor, int]], when: str) -> None:
    for tensor, was in tensors:
        if place(tensor) != was:
            raise HmpError(
                f"HPUGraph: a tensor of shape {tuple(tensor.shape)} has got other memory {when}, so that a replay would read and write "
                "the old; change tensors in place, by copy_() and the like, and capture again after a model was moved or cast"
            )


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


class StepsOfOptimizers:
    """What optimizers hold besides tensors that are written in place: a replay runs none of their Python."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}
        self._seen: dict[int, tuple[torch.optim.Optimizer, Any]] = {}

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what the optimizer holds."""
        self._before[id(optimizer)] = _settings(optimizer), _state(optimizer)

    def ended(self, optimizer: torch.optim.Optimizer) -> None:
        """HmpError where the step has changed something that a replay would not."""
        settings, state = self._before.pop(id(optimizer))
        name = type(optimizer).__name__
        if _state(optimizer) != state:
            raise HmpError(
                f"HPUGraph: this step of {name} made its state, or changed it other than in place, and a replay would do the same again; "
                "make a step before the capture, and if this is said then too, call step() behind replay()"
            )
        if _settings(optimizer) != settings:
            raise HmpError(
                f"HPUGraph: {name} counts its steps in Python, where a replay counts nothing; call step() behind replay(), or take an "
                "optimizer that counts in a tensor, such as FusedAdamW"
            )
        self._seen[id(optimizer)] = optimizer, None

    def close(self) -> None:
        """Notes what their settings are at the end: LARS takes the weight decay away for the time of its step."""
        self._seen = {each: (optimizer, _settings(optimizer)) for each, (optimizer, _) in self._seen.items()}

    def check(self) -> None:
        """HmpError where a number, such as the learning rate, is no longer that of the capture."""
        for optimizer, settings in self._seen.values():
            for before, now in zip(settings, _settings(optimizer), strict=True):
                for name, value in before.items():
                    if now.get(name) != value:
                        raise HmpError(
                            f"HPUGraph.replay(): {name}={value} of {type(optimizer).__name__} is {now.get(name)} now, and a replay uses "
                            "what it was at the capture; call step() behind replay(), or capture again"
                        )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: _known_by(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _state(optimizer: torch.optim.Optimizer) -> Any:
    return {id(param): {name: _known_by(value) for name, value in state.items()} for param, state in optimizer.state.items()}


def _known_by(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_known_by(each) for each in value]
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A step that was captured."""

    calls: list[Call]
    tensors: Tensors
    optimizers: StepsOfOptimizers

    def replay(self) -> None:
        """Makes all calls again, in order."""
        self.tensors.check()
        self.optimizers.check()
        # what torch.autocast cast in the capture has a call of its own
        with torch.no_grad(), torch._C._DisableAutocast():
            for call in self.calls:
                call.again()
        self.tensors.replayed()
        torch.clear_autocast_cache()  # it holds copies of weights as they were, and asks no weight whether it was written to
