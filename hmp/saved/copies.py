"""Which tensors are low-precision copies of weights: backward casts the weight again, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_private import storage_of
from ..weak_tensors import WeakTensor

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_CASTS_AND_VIEWS = frozenset(f"{name}Backward0" for name in "ToCopy LazyClone Expand UnsafeView T Transpose Permute View".split())


def noting(cast: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[Tensor, torch.dtype], Tensor]:
    """`cast`, which notes of which weight its result is a copy: it is now, whatever is written into the weight later."""

    def noted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        low = cast(tensor, dtype)
        if low is not tensor and type(low) is Tensor and (type(tensor) is Parameter or (tensor.is_leaf and tensor.requires_grad)):
            storage_of(low)._hmp_copy_of = WeakTensor(tensor), tensor._version
        return low

    return noted


def weight_of(tensor: Tensor) -> tuple[Tensor, int] | None:
    """The weight, and its version then, of which the tensor is a copy that was noted, or a view of one; None for any other tensor."""
    noted: Any = getattr(storage_of(tensor), "_hmp_copy_of", None)
    if noted is None:
        return None
    weight, version = noted[0](), noted[1]
    copy = tensor if tensor._base is None else tensor._base
    # a cast of the weight has the same look at its memory
    same = weight is not None and copy.shape == weight.shape and copy.stride() == weight.stride() and not copy.storage_offset()
    return (weight, version) if same else None


def is_of_weight(tensor: Tensor) -> bool:
    """Whether nothing but casts and views lies between the tensor and a weight."""
    node: Any = (tensor if tensor._base is None else tensor._base).grad_fn
    while node is not None and node.name() in _CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")
