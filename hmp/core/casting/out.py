"""Writing a result into an `out=` argument, with torch's rules for resizing (R6)."""

from __future__ import annotations

from typing import Any

import torch

from . import tensor_casts
from .tensor_casts import Tensor, castable

_alias_copy = torch.alias_copy


def deliver(result: Any, out: Any) -> Any:
    """Writes `result` into `out`, a tensor or one tensor for each of the result's, and returns what torch returns for `out=`."""
    if isinstance(out, Tensor):
        return _into(result, out)
    places = [_into(part, place) for part, place in zip(result, out, strict=True)]
    named = getattr(torch.return_types, type(result).__name__ + "_out", None)
    return out if named is None else named(places)


def _into(result: Tensor, out: Tensor) -> Tensor:
    with torch.no_grad():
        value = tensor_casts.cast(result, out.dtype) if castable(result) and castable(out) else result
        _alias_copy(value, out=out)
    return out
