"""Tensors that are made on "hpu" are made on the device that stands for it: torch's own dispatcher is told where.

`torch.randn(..., device="hpu")` and all its like, from Python, from C++ and from names that were taken before, end in a few
kernels of the device type. These are registered for "hpu", and no Python function is replaced: a call without "hpu" pays nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .replacements import Replacements
from .standing import standing


def install(replaced: Replacements) -> None:
    """Registers the kernels, until `replaced.undo()`."""
    # the overloads, not torch.empty and its like: under some policies those are hmp's
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")
    replaced.on_undo(library._destroy)

    def empty(
        size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None
    ) -> Any:
        return aten.empty.memory_format(size, dtype=dtype, layout=layout, device=standing(device), memory_format=memory_format)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
        return aten.empty_strided.default(size, stride, dtype=dtype, layout=layout, device=standing(device))

    def tril_indices(
        row: int, col: int, offset: int = 0, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> Any:
        return aten.tril_indices.default(row, col, offset, dtype=dtype, layout=layout, device=standing(device))

    def triu_indices(
        row: int, col: int, offset: int = 0, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> Any:
        return aten.triu_indices.default(row, col, offset, dtype=dtype, layout=layout, device=standing(device))

    library.impl("empty.memory_format", empty, "HPU")
    library.impl("empty_strided", empty_strided, "HPU")
    library.impl("tril_indices", tril_indices, "HPU")
    library.impl("triu_indices", triu_indices, "HPU")
