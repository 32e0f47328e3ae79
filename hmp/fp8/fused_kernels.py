"""What a product in FP8 does to its operands, each as one kernel where a GPU runs it: op by op it takes longer than the product saves.

The kernels are torch.compile's. They give the bits that the ops give.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch

from ..core.casting import Tensor
from ..core.compile.traced_functions import COMPILED_HERE
from ..core.torch_private import dispatch_modes, has_storage

# torch's own, taken before anything is patched
_compile, _compiling, _no_grad = torch.compile, torch.compiler.is_dynamo_compiling, torch.no_grad
_mul, _to = torch.mul, Tensor.to
_contiguous, _detach, _is_contiguous, _view = Tensor.contiguous, Tensor.detach, Tensor.is_contiguous, Tensor.view

_shapes: dict[torch.Size, Callable[[Tensor], Tensor]] = {}
_MOST_SHAPES = 32
FP8_FROM = (8, 9)  # the compute capability from which NVIDIA's GPUs have FP8, and Triton for them


def fuses(tensor: Tensor) -> bool:
    """Return True if ops on `tensor` are to be one kernel: plain eager code, no transform, on a GPU whose compiler knows FP8."""
    return tensor.is_cuda and not _compiling() and not dispatch_modes() and has_storage(tensor) and _compiles_for(tensor.device)


def fused(function: Callable[..., Any], tensor: Tensor, *how: Any) -> Any:
    """Return `function(tensor, *how)`, compiled. It takes no part in autograd."""
    with _no_grad():
        return _compiled(function)(_detach(tensor), *how)


def cast_product(product: Tensor, row_scale: Tensor, column_scale: Tensor, low_dtype: torch.dtype) -> Tensor:
    """Return a product in float32, times the scales of its rows and columns, in the low-precision dtype."""
    if fuses(product):
        found: Tensor = fused(_scaled_and_cast, product, row_scale, column_scale, low_dtype)
        return found
    return _scaled_and_cast(product, row_scale, column_scale, low_dtype)


def _scaled_and_cast(product: Tensor, row_scale: Tensor, column_scale: Tensor, low_dtype: torch.dtype) -> Tensor:
    return _to(_mul(_mul(product, row_scale), column_scale), low_dtype)


def row_major(data: Tensor) -> Tensor:
    """Return a matrix of one-byte numbers with its rows in order: itself where it has them."""
    if _is_contiguous(data):
        return data
    if not fuses(data):
        return _contiguous(data)
    return _view(_rewriter(data.shape)(_view(data, torch.uint8)), data.dtype)


def _rewritten(matrix: Tensor) -> Tensor:
    return _contiguous(matrix)


def _rewriter(shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """Return a kernel for that shape alone if there are few: one for any shape is slower."""
    found = _shapes.get(shape)
    if found is None:
        if len(_shapes) == _MOST_SHAPES:
            return functools.partial(fused, _rewritten)
        # code of its own: torch.compile makes but a few kernels for one
        code = _rewritten.__code__.replace(co_name=f"_rewritten_{len(_shapes)}")
        COMPILED_HERE.add(code)
        found = _shapes[shape] = _compile(types.FunctionType(code, globals()), dynamic=False)
    return found


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    COMPILED_HERE.add(function.__code__)
    return _compile(function, dynamic=True)


@functools.cache
def _compiles_for(device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device)
    return not torch.version.hip and capability >= FP8_FROM and importlib.util.find_spec("triton") is not None
