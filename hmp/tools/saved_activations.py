"""The meter of what is saved for backward, which summary(), record(), benchmark() and tune() count with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

from ..core.observe import Listener, listen, modules
from ..core.torch_private import memory_of


class SavedActivations(Listener):
    """Counts the bytes of the tensors that this thread saves for backward, by the module that is running.

    Each storage counts once, for the first module that saves it; parameters and `own` tensors are left out. A low-precision copy of a
    parameter counts, for it lives as long. Of a checkpoint its inputs count, and nothing inside. What hooks of the program keep for
    themselves is not seen.
    """

    def __init__(self, own: Iterable[torch.Tensor] = ()) -> None:
        self.by_module: Counter[str] = Counter()  # the path of the module → bytes
        self.was_called = False
        self._counted = {memory_of(part.untyped_storage()) for tensor in own for part in _parts(tensor)}
        self._held: list[object] = []  # a freed address would be used again

    @property
    def bytes(self) -> int:
        """Return what has been saved."""
        return self.by_module.total()

    def saved(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is saved."""
        self.was_called = True
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return
        for part in _parts(tensor):
            try:
                storage = part.untyped_storage()
            except (RuntimeError, NotImplementedError):  # of a layout without storage
                if all(part is not each for each in self._held):
                    self._count(part, part.numel() * part.element_size())
                continue
            address = memory_of(storage)
            if storage.nbytes() and address not in self._counted:
                self._counted.add(address)
                self._count(storage, storage.nbytes())

    def _count(self, held: object, nbytes: int) -> None:
        self._held.append(held)
        self.by_module[modules.path] += nbytes

    def kept(self, op: str, tensor: torch.Tensor, nbytes: int | None) -> str:
        """Count what an op saves in a form of its own: instead of `saved`."""
        self.was_called = True
        if nbytes is None:
            self.saved(tensor)
        else:
            self.by_module[modules.path] += nbytes
        return modules.path

    def changed(self, about: str, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Count what packing it again saved."""
        self.by_module[about] -= saved

    def let_go(self) -> None:
        """Hold no memory any more: nothing else will be counted."""
        self._held.clear()


def saved_by(step: Callable[[], object], own: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes that a step, which is run, saves for backward, the tensors `own` left out."""
    found = SavedActivations(own)
    with listen(found):
        step()
    return found.bytes


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what has the tensor's memory: itself, of a sparse one its indices and the elements that it stores."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
