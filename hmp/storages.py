"""Whose a tensor's memory is: who else holds it, and who may write it without a trace on the tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor

# torch's own, taken before anything is patched
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_storage = Tensor.untyped_storage

# The attribute of a storage that says how often it was taken, and these: its memory is written without a trace, now or at any time
_TAKEN, _EXPOSED, _EXPOSED_FOR_GOOD = "_hmp_taken", -1, -2


def owners(tensor: Tensor) -> int:
    """How many hold the tensor's memory, views, `.data`, flat buffers and the storage object counted."""
    storage = _storage(tensor)
    return _use_count(storage._cdata) + sys.getrefcount(storage)


# What `owners` says of a tensor that nobody shares memory with: how storages are counted differs between releases of torch.
SOLE_OWNER = owners(torch.empty(1))


def stream(tensor: Tensor) -> int | None:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


def privacy(tensor: Tensor) -> int:
    """How often the storage of an activation was taken by now; negative where its memory is not torch's own, where somebody has the
    storage, or where it was given away in a form that is written without a trace."""
    storage = _storage(tensor)
    if not storage.resizable() or sys.getrefcount(storage) > _UNTAKEN:  # numpy's memory, or taken by numpy, is not resizable
        return -1
    taken: int = getattr(storage, _TAKEN, 0)
    return taken


def _storage_references(tensor: Tensor) -> int:
    storage = _storage(tensor)
    return sys.getrefcount(storage)


_UNTAKEN = _storage_references(torch.empty(1))


def is_shared(tensor: Tensor) -> bool:
    """Whether other processes may write the tensor's memory."""
    return tensor.is_cpu and bool(_storage(tensor).is_shared())


def storage_of(tensor: Tensor) -> Any:
    """The storage, None where there is none: in a sparse tensor, and in a wrapper of other tensors."""
    with torch._C.DisableTorchFunction():  # no class or mode of the user's sees this; an UninitializedParameter would refuse
        try:
            return _storage(tensor) if tensor.layout is torch.strided else None
        except (RuntimeError, NotImplementedError):
            return None


def take(tensor: Tensor) -> None:
    """Notes that somebody takes the storage of `tensor`, into which they may write until they let go of it."""
    storage = storage_of(tensor)
    if storage is not None and getattr(storage, _TAKEN, 0) >= 0:
        setattr(storage, _TAKEN, getattr(storage, _TAKEN, 0) + 1)


def expose(tensor: Tensor, for_good: bool) -> None:
    """Notes that the memory of `tensor` may be written without a trace, `for_good` if nothing will show when that has ended."""
    storage = storage_of(tensor)
    if storage is not None and getattr(storage, _TAKEN, 0) != _EXPOSED_FOR_GOOD:
        setattr(storage, _TAKEN, _EXPOSED_FOR_GOOD if for_good else _EXPOSED)


def is_private(tensor: Tensor) -> bool:
    """Whether nobody but torch and this tensor's holder can write the tensor's memory: not numpy, a file, another process, a view."""
    storage = _storage(tensor)
    return storage.resizable() and not is_shared(tensor) and getattr(storage, _TAKEN, 0) != _EXPOSED_FOR_GOOD
