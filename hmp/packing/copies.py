"""Which tensors are low-precision copies of weights: backward casts the weight again, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.torch_private import WeakTensor, dispatch_modes, has_storage, in_plain_autograd, memory_of, storage_of

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_grad_enabled = torch.is_grad_enabled  # torch's own, taken before anything is patched
_CASTS_AND_VIEWS = frozenset(f"{name}Backward0" for name in "ToCopy Expand UnsafeView T Transpose Permute View".split())


class Unwritten(NamedTuple):
    """A weight, and its version and memory when it was cast. A write that torch does not count is not noticed."""

    tensor: Tensor
    version: int
    memory: int  # FSDP frees it and fills it again, at another address

    def holds(self) -> bool:
        """Return True if nobody has written the weight since, as far as torch counts."""
        return self.tensor._version == self.version and memory_of(storage_of(self.tensor)) == self.memory


def noting(cast: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return `cast`, which notes on the copy's memory of which weight it is a copy, None for another leaf such as a batch.

    It notes a weight where writes to it are noticed; else the copy is saved.
    """

    def noted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        low = cast(tensor, dtype)
        if low is tensor or type(low) is not Tensor or not tensor.is_leaf:
            return low
        if not _grad_enabled() or dispatch_modes() or not in_plain_autograd() or tensor.layout is not torch.strided:
            return low
        if has_storage(tensor) and has_storage(low):
            is_weight = type(tensor) is Parameter or tensor.requires_grad
            storage_of(low)._hmp_copy_of = (WeakTensor(tensor), tensor._version, memory_of(storage_of(tensor))) if is_weight else None
        return low

    return noted


def weight_of(tensor: Tensor) -> Unwritten | None:
    """Return the weight of which the tensor is a copy that was noted, or a view of one; None for any other tensor."""
    noted: Any = getattr(storage_of(tensor), "_hmp_copy_of", None)
    if noted is None:
        return None
    weight = noted[0]()
    copy = tensor if tensor._base is None else tensor._base
    # a cast of the weight has the same look at its memory
    same = weight is not None and copy.shape == weight.shape and copy.stride() == weight.stride() and not copy.storage_offset()
    return Unwritten(weight, *noted[1:]) if same and copy._version == 0 else None


def is_cast_copy(tensor: Tensor) -> bool:
    """Return True if a cast of hmp's made the tensor, which has no gradient, for one call: the program does not hold it."""
    return hasattr(storage_of(tensor), "_hmp_copy_of")


def is_of_weight(tensor: Tensor) -> bool:
    """Return True if nothing but casts and views lies between the tensor and a weight."""
    node: Any = (tensor if tensor._base is None else tensor._base).grad_fn
    while node is not None and node.name() in _CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")
