"""How this processor computes low-precision products under hmp, for oracles: by torch's kernel, or in float32 and rounded (R11)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def computes_in_float32(dtype: torch.dtype) -> bool:
    """Whether products in the dtype compute in float32 on the CPU here: by HMP_LOW_KERNELS and the flags that torch itself asks."""
    choice = os.environ.get("HMP_LOW_KERNELS", "auto")
    if choice != "auto" or dtype not in (torch.bfloat16, torch.float16):
        return choice == "float32"
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    return not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()


def in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` for low-precision tensors, computed in float32 and rounded: plain torch, casts written out."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        low = next(t.dtype for t in _tensors((args, kwargs)))
        return _mapped(op(*_mapped(args, low, torch.float32), **_mapped(kwargs, low, torch.float32)), torch.float32, low)

    return computed


def as_computed(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as hmp has the CPU compute it here for low-precision tensors: by `in_float32`, or `op` itself."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        first = next(_tensors((args, kwargs)), None)
        is_slow = first is not None and first.is_cpu and first.dtype is not torch.float32 and computes_in_float32(first.dtype)
        return (in_float32(op) if is_slow else op)(*args, **kwargs)

    return computed


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _mapped(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(wanted) if value.dtype is given else value
    if isinstance(value, dict):
        return {name: _mapped(each, given, wanted) for name, each in value.items()}
    return type(value)(_mapped(each, given, wanted) for each in value) if isinstance(value, (list, tuple)) else value
