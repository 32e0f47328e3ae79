"""The memory of one step: the allocator's peak on an accelerator, the bytes saved for backward elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..torch_private import is_any_autocast_enabled
from .saved_bytes import SavedBytes

PEAK = "peak memory"
SAVED = "saved for backward"


class Peak:
    """Measures the most bytes that the allocator of a device held during one step, hmp's own copies of the state left out."""

    kind = PEAK

    def __init__(self, device: torch.device, copies: int) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._copies = copies

    def measure(self, step: Callable[[], object]) -> int:
        """The bytes of one step, which is run."""
        self._module.reset_peak_memory_stats(self._device)
        step()
        peak: int = self._module.max_memory_allocated(self._device)
        return peak - self._copies


class Saved:
    """Measures the bytes that one step saves for backward."""

    kind = SAVED

    def __init__(self, own: list[torch.Tensor]) -> None:
        self._own = own

    def measure(self, step: Callable[[], object]) -> int:
        """The bytes of one step, which is run."""
        with SavedBytes(self._own).watch() as saved:
            step()
        return saved.bytes


def allocated(device: torch.device) -> int:
    """The bytes that the device's allocator holds now, 0 where it has none that tells."""
    tell = getattr(getattr(torch, device.type, None), "memory_allocated", None)
    return 0 if tell is None else int(tell(device))


def meter(device: torch.device, own: list[torch.Tensor], copies: int) -> Peak | Saved:
    """The way to measure on this device."""
    module = getattr(torch, device.type, None)
    if all(hasattr(module, name) for name in ("reset_peak_memory_stats", "max_memory_allocated")):
        return Peak(device, copies)
    return Saved(own)


def enters_autocast(step: Callable[[], object]) -> bool:
    """Whether the step, which is run, saves a tensor for backward while torch.autocast is enabled."""
    found = False

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found = found or is_any_autocast_enabled()
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        step()
    return found
