"""How this processor computes products in a low-precision dtype for oracles: by torch's kernel, or in float32 (R11)."""

from __future__ import annotations

import contextlib
import os
import platform
import types as types_
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

# What computes so: products, convolutions, recurrent layers, and what follows one of them, by torch's names without underscores.
_OPS = frozenset(
    """
    linear matmul rmatmul mm bmm addmm addbmm baddbmm inner einsum tensordot chain_matmul matrix_power cov corrcoef addmm_activation
    linalg_matmul linalg_multi_dot linalg_matrix_power sparse_mm sparse_addmm linear_cross_entropy bilinear scaled_dot_product_attention
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """.split()
)


def computes_in_float32(dtype: torch.dtype) -> bool:
    """Whether products in the dtype compute in float32 on the CPU here: by HMP_LOW_KERNELS and the flags that torch itself asks."""
    choice = os.environ.get("HMP_LOW_KERNELS", "auto")
    if choice != "auto" or dtype not in (torch.bfloat16, torch.float16):
        return choice == "float32"
    if dtype is torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    # true for any AVX512, which alone multiplies no bfloat16
    multiplies = platform.machine() != "x86_64" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return not (torch.ops.mkldnn._is_mkldnn_bf16_supported() and multiplies)


@contextlib.contextmanager
def processor(kernels: str) -> Iterator[None]:
    """As on a processor without instructions for low dtypes for "float32", with them for "native", and as here for ""."""
    with mock.patch.dict(os.environ, {"HMP_LOW_KERNELS": kernels} if kernels else {}):
        yield


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


class _AsComputed(TorchFunctionMode):
    """Each such op that torch's functions, methods and modules call computes in float32 if its tensors have one low-precision dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = list(_tensors((args, kwargs)))
        writes = kwargs.get("out") is not None or (name.endswith("_") and not name.startswith("_"))
        is_one = name.strip("_") in _OPS and not writes and len(tensors) > (name == "einsum") and len({t.dtype for t in tensors}) == 1
        if not is_one or not tensors[0].is_cpu or not computes_in_float32(tensors[0].dtype) or tensors[0].dtype is torch.float32:
            if func is not torch.nn.functional.multi_head_attention_forward:
                return func(*args, **kwargs)
            with self:  # what it calls computes so, and it does not ask again whether somebody takes it over
                names = {**func.__globals__, "has_torch_function": lambda tensors: False}
                return types_.FunctionType(func.__code__, names, None, func.__defaults__)(*args, **kwargs)
        return in_float32(func)(*args, **kwargs)


@contextlib.contextmanager
def products_as_computed() -> Iterator[None]:
    """Plain torch in here computes as hmp has the CPU compute, whatever it is that calls the ops: a module or a whole model."""
    with _AsComputed() if any(map(computes_in_float32, (torch.bfloat16, torch.float16))) else contextlib.nullcontext():
        yield


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def _mapped(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(wanted) if isinstance(leaf, torch.Tensor) and leaf.dtype is given else leaf, value)
