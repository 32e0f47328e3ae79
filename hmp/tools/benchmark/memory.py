"""The memory of one step: the allocator's peak on an accelerator, the bytes saved elsewhere; and devices as users name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...core.observe import Listener, listen
from ...core.saved import is_pending
from ...core.torch_private import is_any_autocast_enabled, memory_of
from ...errors import HmpError


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
        """Make a context in which saved tensors are counted."""
        with listen(self):
            yield self

    @property
    def bytes(self) -> int:
        """Return what has been saved."""
        in_storages = sum(storage.nbytes() for storage in self._kept.values())
        return in_storages + sum(t.numel() * t.element_size() for t in self._opaque) + self._packed

    def saved(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is saved."""
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
        """Count what an op keeps that is to be packed: in place of `saved`."""
        address = memory_of(tensor.untyped_storage())
        counts = address not in self._own and address not in self._kept
        if counts:
            self._packed += left
            self._listed.add(address)
        return counts

    def changed(self, about: bool, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Count what packing it saved."""
        self._packed -= saved if about else 0


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what has the tensor's memory: itself, of a sparse one its indices and the elements that it stores."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


PEAK = "peak memory"
SAVED = "saved for backward"
Meter = Callable[[Callable[[], object]], int]  # gives the bytes of a step, which it runs


def saved_by(step: Callable[[], object], own: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes that a step, which is run, saves for backward, the tensors `own` left out."""
    with SavedBytes(own).watch() as found:
        step()
    return found.bytes


def allocated(device: torch.device) -> int:
    """Return the bytes that the device's allocator holds now, 0 if it does not report them."""
    tell = getattr(getattr(torch, device.type, None), "memory_allocated", None)
    return 0 if tell is None else int(tell(device))


def meter(device: torch.device, own: list[torch.Tensor], copies: int) -> tuple[str, Meter]:
    """Return which memory is measured on this device, and how.

    The most that its allocator holds during a step, less the `copies` of the state that are hmp's; elsewhere what a step saves for
    backward, the state's `own` tensors left out.
    """
    module: Any = getattr(torch, device.type, None)

    def peak(step: Callable[[], object]) -> int:
        module.reset_peak_memory_stats(device)
        step()
        return int(module.max_memory_allocated(device)) - copies

    tells = all(hasattr(module, name) for name in ("reset_peak_memory_stats", "max_memory_allocated"))
    return (PEAK, peak) if tells else (SAVED, lambda step: saved_by(step, own))


def enters_autocast(step: Callable[[], object]) -> bool:
    """Return True if the step, which is run, saves a tensor for backward while torch.autocast is enabled."""
    found = False

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found = found or is_any_autocast_enabled()
        return tensor.detach()  # an op's result would hold the op's node, and nothing would free the two

    with saved_tensors_hooks(look, lambda tensor: tensor):
        step()
    return found


def device_of(given: Any, where: str = "") -> torch.device:
    """Return the device that `given`, an argument device=, means. HmpError, which begins with `where`, for what means none."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        why = f": {error}" if isinstance(given, str) else ""  # of another type torch says over several lines what it takes
        raise HmpError(f"{where}invalid device={given!r}{why}: expected one such as 'cpu' or 'cuda:0'") from None


def check_there(device: torch.device, where: str) -> None:
    """HmpError, which begins with `where`, for a kind of device that torch knows and does not see here."""
    is_available = getattr(getattr(torch, device.type, None), "is_available", None)
    if is_available is not None and not is_available():
        kind = device.type.upper()
        raise HmpError(f"{where}: torch sees no {kind} device here; ask for 'cpu', or install torch for {kind}")
