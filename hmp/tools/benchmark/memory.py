"""The memory of one step: the allocator's peak on an accelerator, the bytes saved elsewhere; and devices as users name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...core.torch_private import is_any_autocast_enabled
from ...errors import HmpError
from ..saved_activations import saved_by

PEAK = "peak memory"
SAVED = "saved for backward"
Meter = Callable[[Callable[[], object]], int]  # gives the bytes of a step, which it runs


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
        raise HmpError(f"{where}: torch finds no {kind} device; use 'cpu', or install torch for {kind}")
