"""torch's dispatcher, in private names that are read when they are asked for: what has kernels where."""

from __future__ import annotations

import itertools

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
