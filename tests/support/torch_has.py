"""Which torch the tests run with, and what it tells of its graphs."""

from __future__ import annotations

import torch


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version of torch."""
    return tuple(int(part) for part in version.split(".")[:2])


TORCH = release(torch.__version__)
_AUTOGRAD = torch._C._autograd
# what a node of the graph saved can be looked at
SAVED_TENSORS = hasattr(getattr(_AUTOGRAD, "SavedTensor", None), "data")
# the hooks that are active can be asked for, without which hmp packs nothing
SAVED_TENSORS_HOOKS = hasattr(_AUTOGRAD, "_top_saved_tensors_default_hooks")
