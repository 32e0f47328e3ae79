"""The meter of what is kept for backward: benchmark(), tune() and the demo all count with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..torch_private import address_of


class SavedBytes:
    """Counts the bytes of the tensors that autograd saves for backward inside `watch()`.

    Each storage counts once; parameters and `own` tensors are left out. A low-precision copy of a parameter counts, for it lives as long.
    """

    def __init__(self, own: Iterable[torch.Tensor] = ()) -> None:
        self._own = {address_of(tensor.untyped_storage()) for tensor in own}
        self._kept: dict[int, torch.UntypedStorage] = {}  # keeps them alive: a freed address would be used again
        self._opaque: list[torch.Tensor] = []  # of a layout without storage

    @contextmanager
    def watch(self) -> Iterator[SavedBytes]:
        """A stretch in which saved tensors are counted."""
        with saved_tensors_hooks(self.keep, lambda tensor: tensor):
            yield self

    @property
    def bytes(self) -> int:
        """What has been saved."""
        return sum(storage.nbytes() for storage in self._kept.values()) + sum(t.numel() * t.element_size() for t in self._opaque)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that is saved, and gives it back."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return tensor
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            if not any(tensor is known for known in self._opaque):
                self._opaque.append(tensor)
            return tensor
        if storage.nbytes() and (address := address_of(storage)) not in self._own:
            self._kept[address] = storage
        return tensor
