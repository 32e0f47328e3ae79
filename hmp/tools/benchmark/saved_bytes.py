"""The meter of what is kept for backward: benchmark() and tune() count with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ...core.observe import Listener, listen
from ...core.saved import is_pending
from ...core.torch_private import memory_of


class SavedBytes(Listener):
    """Counts the bytes of the tensors that autograd saves for backward inside `watch()`.

    Each storage counts once; parameters and `own` tensors are left out. A low-precision copy of a parameter counts, for it lives as long.
    """

    def __init__(self, own: Iterable[torch.Tensor] = ()) -> None:
        self._own = {memory_of(part.untyped_storage()) for tensor in own for part in _parts(tensor)}
        self._kept: dict[int, torch.UntypedStorage] = {}  # keeps them alive: a freed address would be used again
        self._opaque: list[torch.Tensor] = []  # of a layout without storage
        self._packed = 0  # bytes of what ops keep whose tensors the policy has packed
        self._listed: set[int] = set()  # the memories that are counted there

    @contextmanager
    def watch(self) -> Iterator[SavedBytes]:
        """A stretch in which saved tensors are counted."""
        with listen(self):
            yield self

    @property
    def bytes(self) -> int:
        """What has been saved."""
        in_storages = sum(storage.nbytes() for storage in self._kept.values())
        return in_storages + sum(t.numel() * t.element_size() for t in self._opaque) + self._packed

    def saved(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that is saved."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return
        for part in _parts(tensor):
            try:
                storage = part.untyped_storage()
            except (RuntimeError, NotImplementedError):
                if not any(part is known for known in self._opaque):
                    self._opaque.append(part)
                continue
            address = memory_of(storage)
            in_packed = address in self._listed and is_pending(address)  # a listed op keeps it, too
            if storage.nbytes() and address not in self._own and not in_packed:
                self._kept[address] = storage

    def kept(self, op: str, tensor: torch.Tensor, nbytes: int, left: int) -> bool:
        """Counts what an op keeps that is to be packed: in place of `saved`."""
        address = memory_of(tensor.untyped_storage())
        counts = address not in self._own and address not in self._kept
        if counts:
            self._packed += left
            self._listed.add(address)
        return counts

    def changed(self, about: bool, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Counts what packing it saved."""
        self._packed -= saved if about else 0


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What has the tensor's memory: itself, of a sparse one its indices and the elements that it stores."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
