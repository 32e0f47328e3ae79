"""Habana's names for torch.amp."""

from __future__ import annotations

from typing import Any

import torch

from .device_map import standing

__all__ = ["GradScaler", "autocast"]


class autocast(torch.autocast):
    """`torch.autocast("hpu")`; bfloat16 where no dtype is given."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        super().__init__("hpu", dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for the device that stands for "hpu"."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(standing().type, *args, **kwargs)
