"""The models that run while somebody records, and what a call of each keeps for backward."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ...core.casting import Tensor, dtype_name
from ...core.observe import Listener, modules
from ...core.saved_tensors import counting, innermost_counter
from ...core.torch_private import are_saved_tensors_hooks_allowed, can_be_disabled, graph_task, in_plain_autograd, saved_tensors_hooks
from ..saved_activations import SavedActivations


@dataclass(frozen=True)
class Model:
    """An outermost module with parameters that was called.

    The name of its class, `count` of them with such parameters, and of one the numbers of its parameters by dtype, of those to be trained,
    and their bytes.

    `kept` are the bytes that its first call that autograd recorded keeps for backward, by the path of the module that ran: each storage
    once, at the first module that keeps it, parameters and buffers left out. `kept_weight_bytes` of them are copies of weights in another
    dtype, the others activations. Of a checkpoint its inputs count. None without such a call, where other hooks for saved tensors are
    active around the model (save_on_cpu, a checkpoint), or if torch does not show it; what such hooks inside of it keep themselves is not
    seen.
    """

    name: str
    parameters: dict[str, int]
    trainable: int
    parameter_bytes: int
    kept: dict[str, int] | None = None
    count: int = 1
    kept_weight_bytes: int = 0

    @property
    def alike(self) -> tuple[Any, ...]:
        """Return what is the same of models that are one row."""
        return self.name, *self.parameters.items(), self.trainable, self.parameter_bytes

    @property
    def size(self) -> int:
        """Return the number of its parameters."""
        return sum(self.parameters.values())

    @property
    def dtypes(self) -> str:
        """Return the dtypes of its parameters, with how many are of which where there are several."""
        parts = self.parameters.items()
        return ", ".join(f"{number:,} {dtype}" for dtype, number in parts) if len(parts) > 1 else "".join(self.parameters)

    @property
    def kept_bytes(self) -> int:
        """Return what a call of it keeps, in all its modules."""
        return sum((self.kept or {}).values())


def pattern(path: str) -> str:
    """Return the path of a module with `*` for its numbers, by which it is known as one of several layers.

    Of one that is only numbered itself.
    """
    parts = path.split(".")
    return path if all(map(str.isdecimal, parts)) else ".".join("*" if part.isdecimal() else part for part in parts)


def merge_models(models: Iterable[Model]) -> list[Model]:
    """Return the models of several recordings: those of one class with the same parameters are the same ones."""
    found: dict[Any, Model] = {}
    for model in models:
        known = found.get(model.alike, model)
        met = model if known.kept is None else known
        found[model.alike] = replace(met, count=max(known.count, model.count))
    return list(found.values())


class _Followed(threading.local):
    """The call of an outermost module in this thread, whose saved tensors are counted."""

    meter: SavedActivations | None = None
    hook: AbstractContextManager[None] | None = None


class RunningModels(Listener):
    """The running modules, which are looked at where they are outermost ones: once, and without keeping them alive."""

    def __init__(self) -> None:
        self._models: dict[Any, Model] = {}  # by what is the same of alike ones
        self._meters: dict[Any, SavedActivations] = {}  # of the first call of each
        self._followed = _Followed()
        # the key of each outermost module, None without parameters
        self._keys: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()

    @property
    def found(self) -> list[Model]:
        """Return the models so far. What is packed after a call of one is counted by then."""
        found = []
        for key, model in self._models.items():
            meter = self._meters.get(key)
            kept = None if meter is None else {path: nbytes for path, nbytes in meter.by_module.items() if nbytes}
            found.append(replace(model, kept=kept, kept_weight_bytes=0 if meter is None else meter.weight_bytes))
        return found

    def entered(self, module: torch.nn.Module) -> None:
        """Begin to count in the call of an outermost module."""
        if len(modules.running) < 2:
            self.close()  # a call that Ctrl-C has ended
            if self._is_to_be_followed(module):
                own = (each for each in (*module.parameters(), *module.buffers()) if not is_lazy(each))
                meter = self._followed.meter = SavedActivations(own)
                self._followed.hook = counting(meter.saved)
                self._followed.hook.__enter__()

    def left(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool) -> None:
        """Note an outermost module, and what the call saved."""
        if len(modules.running) > 1:
            return
        meter = self._followed.meter
        self.close()
        # of a checkpoint's recomputation, in backward, a part of the model is the outermost
        if module not in self._keys and graph_task() < 0:
            self._keys[module] = self._noted(module)
        key = self._keys.get(module)
        if meter is not None and meter.was_called and key is not None:
            meter.let_go()
            self._meters.setdefault(key, meter)

    def close(self) -> None:
        """Count no longer in this thread."""
        hook, self._followed.hook, self._followed.meter = self._followed.hook, None, None
        if hook is not None:
            hook.__exit__(None, None, None)

    def kept(self, op: str, tensor: Tensor, nbytes: int | None) -> tuple[SavedActivations, str] | None:
        """Count what an op saves in a form of its own."""
        meter = self._followed.meter
        return None if meter is None else (meter, meter.kept(op, tensor, nbytes))

    def changed(self, about: tuple[SavedActivations, str] | None, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Count what packing it again saved."""
        if about is not None:
            meter, path = about
            meter.changed(path, saved, seconds, errors)

    def _is_to_be_followed(self, module: torch.nn.Module) -> bool:
        """Return True if the call may be the first one of the model that autograd records."""
        if not torch.is_grad_enabled() or graph_task() >= 0 or not _can_count():
            return False
        key = self._keys.get(module, module)
        return key is not None and key not in self._meters

    def _noted(self, module: torch.nn.Module) -> Any:
        """Return the key of the module, a model; None without parameters."""
        parameters = [each for each in module.parameters() if not is_lazy(each)]
        if not parameters:
            return None
        sizes: Counter[str] = Counter()
        for each in parameters:
            sizes[dtype_name(each.dtype)] += each.numel()
        trainable = sum(each.numel() for each in parameters if each.requires_grad)
        model = Model(module._get_name(), dict(sizes), trainable, sum(each.numel() * each.element_size() for each in parameters))
        known = self._models.get(model.alike)
        self._models[model.alike] = model if known is None else replace(known, count=known.count + 1)
        return model.alike


def _can_count() -> bool:
    """Return True if counting would take the place of no hook in this thread, and would stop nothing that refuses hooks."""
    if saved_tensors_hooks is None or not can_be_disabled or not are_saved_tensors_hooks_allowed() or not in_plain_autograd():
        return False
    return saved_tensors_hooks(True) is None or innermost_counter() is not None
