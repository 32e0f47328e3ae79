"""What hooks of plain torch see of a model's forward pass."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Plain:
    """What hooks of plain torch see of a forward pass: by module its result's dtype and shape, and the bytes that it saves first."""

    def __init__(self, model: nn.Module) -> None:
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.saved: Counter[str] = Counter()
        self._running: list[str] = []
        self._known = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        self._alive: list[torch.Tensor] = []
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, args, path=path: self._running.append(path))
            module.register_forward_hook(lambda module, args, out, path=path: self._left(path, out))

    def _left(self, path: str, out: Any) -> None:
        assert self._running.pop() == path
        if isinstance(out, torch.Tensor):
            self.dtypes[path], self.shapes[path] = str(out.dtype).removeprefix("torch."), tuple(out.shape)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._alive.append(tensor)
            self.saved[self._running[-1] if self._running else "(outside)"] += storage.nbytes()
        return tensor


def seen_by_hooks(model: nn.Module, forward: Callable[[nn.Module], Any]) -> Plain:
    """What they see while `forward` calls a copy of the model."""
    watched = copy.deepcopy(model)
    found = Plain(watched)
    with saved_tensors_hooks(found.keep, lambda tensor: tensor):
        forward(watched)
    return found
