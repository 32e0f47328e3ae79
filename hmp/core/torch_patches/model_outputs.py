"""What a model returns, in one dtype: `apply(model, outputs="float32")`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import torch

from ...errors import HmpError
from ..casting import castable, map_tensors
from ..formatting import dtype_name

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_dtype(outputs: Any) -> torch.dtype | None:
    """The dtype that `outputs=` names. HmpError for what is none that outputs may have."""
    for dtype in _DTYPES:
        if outputs is dtype or (isinstance(outputs, str) and outputs.removeprefix("torch.") == dtype_name(dtype)):
            return dtype
    if outputs is None:
        return None
    raise HmpError(f"outputs={outputs!r}: expected None or one of {', '.join(map(dtype_name, _DTYPES))}")


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its float32, bfloat16 and float16 tensors in `dtype`, also those in lists, tuples, dicts, other mappings and dataclasses
    in it. What holds none of another dtype is returned itself."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if castable(tensor) else tensor

    def others(found: Any) -> Any:
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            names = [field.name for field in dataclasses.fields(found) if hasattr(found, field.name)]
            changed = {name: new for name in names if (new := map_tensors(old := getattr(found, name), one, others)) is not old}
            instance: Any = copy.copy(found) if changed else found
            for name, new in changed.items():
                object.__setattr__(instance, name, new)  # it may be frozen
            return instance
        if isinstance(found, MutableMapping):
            items = {key: new for key, old in found.items() if (new := map_tensors(old, one, others)) is not old}
            copied = copy.copy(found) if items else found
            for key, new in items.items():
                copied[key] = new
            return copied
        return found

    return map_tensors(value, one, others)
