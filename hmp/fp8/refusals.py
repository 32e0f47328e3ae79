"""Why a call cannot run in FP8: then the caller runs it in the low-precision dtype, where torch's own errors are given too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.casting import Tensor, castable
from ..core.torch_private import in_plain_autograd, is_traced
from .products import BROADCAST, CALLS, ProductCall
from .quantization import Recipe

# torch's own, taken before anything is patched
_compiling, _exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting
_grad_enabled = torch.is_grad_enabled
_Parameter = torch.nn.Parameter

_WITHOUT_FLOAT8 = frozenset({"mps"})  # device types that torch has no such tensors for


def why_not(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], recipe: Recipe, low_dtype: torch.dtype) -> str:
    """Return why PRODUCTS[op] cannot take the call, in few words; "" where it can.

    It reads shapes, dtypes and the like, never values. There are few different answers, so that they can be counted.
    """
    try:
        call = CALLS[op](*args, **kwargs)
    except TypeError:
        return "arguments that FP8 does not support"
    tensors = [each for each in (call.left, call.right, call.added) if each is not None]
    return _of_tensors(tensors) or _of_shapes(op, call, recipe) or _of_the_rest(call, tensors, low_dtype)


def _of_tensors(tensors: list[Any]) -> str:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return "arguments that FP8 does not support"
        if type(tensor) is not Tensor and type(tensor) is not _Parameter and not is_traced(tensor):
            return "a tensor subclass"
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return "a tensor that is not dense"
        if not castable(tensor):
            return f"a {str(tensor.dtype).removeprefix('torch.')} input"
        if tensor.device != tensors[0].device:
            return "several devices"
    if tensors[0].device.type in _WITHOUT_FLOAT8:
        return "no float8 on this device"
    if not _compiling() and not in_plain_autograd():
        return "torch.func, forward-mode differentiation or torch.jit.trace"
    return ""


def _of_shapes(op: str, call: ProductCall, recipe: Recipe) -> str:
    """Return why the operands' shapes do not do, those included that torch will refuse."""
    left, right = call.left, call.right
    if (left.dim() < call.dims[0] or right.dim() < call.dims[1]) and min(left.dim(), right.dim()) < 2:
        return "a vector"
    is_linear = op == "linear"
    if (call.exactly and (left.dim(), right.dim()) != call.dims) or (is_linear and right.dim() != 2):
        return "shapes that torch refuses"
    inner, outer = (right.shape[-1], right.shape[-2]) if is_linear else (right.shape[-2], right.shape[-1])
    if left.shape[-1] != inner or not _is_batch(op, left, right) or not _can_be_added(op, call, outer):
        return "shapes that torch refuses"
    if left.numel() == 0 or right.numel() == 0:
        return "an empty tensor"
    if op == "addbmm":
        inner = inner * left.shape[0]  # it is summed over the batch too
    return f"dimensions that aren't multiples of {recipe.multiple}" if inner % recipe.multiple or outer % recipe.multiple else ""


def _is_batch(op: str, left: Tensor, right: Tensor) -> bool:
    """Return True if the batch dimensions go together."""
    if op not in BROADCAST:
        return left.dim() != 3 or right.dim() != 3 or left.shape[0] == right.shape[0]
    pairs = zip(reversed(left.shape[:-2]), reversed(right.shape[:-2]), strict=False)
    return all(one == other or one == 1 or other == 1 for one, other in pairs)


def _can_be_added(op: str, call: ProductCall, outer: int) -> bool:
    """Return True if what is added has a shape that broadcasts to the product's."""
    if call.added is None:
        return True
    if op == "linear":
        return call.added.dim() == 1 and bool(call.added.shape[0] == outer)
    rows = call.left.shape[-2]
    shape = (call.left.shape[0], rows, outer) if op == "baddbmm" else (rows, outer)
    given = call.added.shape
    return len(given) <= len(shape) and all(size in (1, needed) for size, needed in zip(reversed(given), reversed(shape), strict=False))


def _of_the_rest(call: ProductCall, tensors: list[Tensor], low_dtype: torch.dtype) -> str:
    if call.out_dtype is not None:
        return "out_dtype is given"
    if not isinstance(call.beta, (int, float)) or not isinstance(call.alpha, (int, float)):
        return "an alpha or beta that isn't a number"
    needs_gradient = _grad_enabled() and any(each.requires_grad for each in tensors)
    if needs_gradient and _exporting():
        # an exported graph has no autograd.Function: the steps of the rounding would be differentiated
        return "torch.export where a gradient is needed (export under torch.no_grad())"
    if call.beta == 0 and needs_gradient and call.added.requires_grad:
        return "beta=0 with an input that needs a gradient"  # which is 0, where FP8 would give none
    if call.out is None:
        return ""
    if not isinstance(call.out, Tensor) or call.out.dtype not in (low_dtype, tensors[0].dtype) or call.out.layout is not torch.strided:
        return "out= of another kind"
    return "out= where a gradient is needed" if needs_gradient or call.out.requires_grad else ""
