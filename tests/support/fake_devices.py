"""Tensors of devices that are not here: fake ones, which have a device, a dtype and a shape but no values."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICES = ("hpu", "cuda", "xpu", "mps")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside is a fake one; what torch remembers of earlier calls on fake tensors is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(torch, "hpu"):
            # what Habana's plugin brings
            stub: Any = types.ModuleType("torch.hpu")
            stub.is_available = stub.is_initialized = lambda: False
            stub.current_device, stub.device_count = lambda: 0, lambda: 1
            stub.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
            patch.setattr(torch, "hpu", stub, raising=False)
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        mode.cache_enabled = False
        with mode:
            yield


class Trace(TorchDispatchMode):
    """Notes what arrives at ATen: each op's name, and the dtypes and numbers among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        seen = [v.dtype if isinstance(v, torch.Tensor) else v for v in leaves if isinstance(v, (torch.Tensor, torch.dtype, int, float))]
        self.calls.append((func._schema.name.removeprefix("aten::"), seen))
        return func(*args, **(kwargs or {}))

    def arguments(self, op: str) -> list[Any]:
        """What arrived at the only call of `op`."""
        (found,) = [seen for name, seen in self.calls if name == op]
        return found

    def casts(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """Every cast, in order: from, to."""
        return [(seen[0], seen[1]) for name, seen in self.calls if name == "_to_copy"]
