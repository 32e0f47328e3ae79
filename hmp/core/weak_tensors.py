"""Weak references to tensors, of a kind that the installed torch supports."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from .torch_releases import TORCH

_IS_SAFE = TORCH >= (2, 11)

# Refers to a tensor weakly. Up to torch 2.10 one that a plain weak reference gives is freed under its Python object with its graph.
WeakTensor: Any = weakref.ref if _IS_SAFE else TensorWeakRef


class OwnWeakTensor:
    """Refers to a tensor weakly for the thread that made the reference; to others the tensor is gone.

    Up to torch 2.10 no reference can find a tensor that another thread's graph may free at the same time: its memory is freed twice.
    """

    __slots__ = ("_reference", "_thread")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._thread = WeakTensor(tensor), get_ident()

    def __call__(self) -> torch.Tensor | None:
        """Return the tensor, None once it is freed or in another thread."""
        found: torch.Tensor | None = self._reference() if get_ident() == self._thread else None
        return found


# Refers weakly to a tensor that graphs of several threads may hold.
SharedWeakTensor: Any = WeakTensor if _IS_SAFE else OwnWeakTensor
