"""Tensors that are made on "hpu" are made on the device that stands for it: torch's own dispatcher is told where.

`torch.randn(..., device="hpu")` and all its like, from Python, from C++ and from names that were taken before, end in a few
kernels of the device type. These are registered for "hpu", and no Python function is replaced: a call without "hpu" pays nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .device_map import standing
from .replacements import Replacements


def install(replaced: Replacements) -> None:
    """Registers the kernels, until `replaced.undo()`."""
    # the overloads, not torch.empty and its like: under some policies those are hmp's
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")
    replaced.on_undo(library._destroy)
    for name, overload in (
        ("empty.memory_format", aten.empty.memory_format),
        ("empty_strided", aten.empty_strided.default),
        ("tril_indices", aten.tril_indices.default),
        ("triu_indices", aten.triu_indices.default),
    ):
        library.impl(name, _on_standing(overload), "HPU")


def _on_standing(overload: Any) -> Any:
    """A kernel for "hpu" that makes what `overload` makes, on the device that stands for it; its memory is not pinned."""

    def made(*args: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Any:
        return overload(*args, device=standing(device), **options)

    return made
