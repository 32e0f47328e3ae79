"""Devices as users name them: which one is meant, and whether it is there."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import HmpError


def device_of(given: Any, where: str = "") -> torch.device:
    """The device that `given`, an argument device=, means. HmpError, which begins with `where`, for what means none."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        why = f": {error}" if isinstance(given, str) else ""  # of another type torch says over several lines what it takes
        raise HmpError(f"{where}device={given!r} is none{why}; give one such as 'cpu' or 'cuda:0'") from None


def check_there(device: torch.device, where: str) -> None:
    """HmpError, which begins with `where`, for a kind of device that torch knows and does not see here."""
    is_available = getattr(getattr(torch, device.type, None), "is_available", None)
    if is_available is not None and not is_available():
        kind = device.type.upper()
        raise HmpError(f"{where}: torch sees no {kind} device here; ask for 'cpu', or install torch for {kind}")
