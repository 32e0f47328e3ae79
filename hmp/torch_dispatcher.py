"""torch's dispatcher, in private names that are read when they are asked for: what has kernels where, and kernels for a while."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import torch


def dispatch_key(functionality: str, device: str) -> str:
    """The name of a dispatch key: "AutocastCUDA"."""
    return f"{functionality}{torch._C._dispatch_key_for_device(device)}"


def operators(key: str = "") -> dict[str, list[str]]:
    """ATen's operators, each with its overloads, "conv1d" and "conv1d.padding"; with a key those that have a kernel of their own there."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::") and (not key or has_kernel(name, key)))
    bare = sorted(name.removeprefix("aten::") for name in names)
    return {base: list(group) for base, group in itertools.groupby(bare, lambda name: name.partition(".")[0])}


def temporary_kernels() -> AbstractContextManager[torch.library.Library]:
    """A library of kernels for ATen's operators, which are taken out again where the context ends."""
    library: AbstractContextManager[torch.library.Library] = torch.library._scoped_library("aten", "IMPL")
    return library


def without_memory() -> AbstractContextManager[Any]:
    """A mode in which tensors are made that have a device, and no memory there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()
