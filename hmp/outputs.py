"""A result arrives in `out`, with torch's rules for resizing (R6)."""

from __future__ import annotations

from typing import Any

import torch

from . import casting
from .casting import Tensor, castable

_alias_copy = torch.alias_copy


def deliver(result: Any, out: Tensor) -> Tensor:
    """Writes `result` into `out` with torch's rules for resizing, and gives `out` back."""
    with torch.no_grad():
        value = casting.cast(result, out.dtype) if castable(result) and castable(out) else result
        _alias_copy(value, out=out)
    return out
