"""Why a call cannot run in FP8: then the caller runs it in the low-precision dtype, where torch's own errors are given too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.casting import Tensor, castable
from ..core.torch_private import in_plain_autograd, is_traced
from ..plug_in_math import CALLS, ProductCall, fits, why_not_rest
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
    return (
        _of_tensors(call.tensors)
        or _of_shapes(op, call, recipe)
        or why_not_rest(call, low_dtype, call.tensors[0].dtype)
        or _of_gradient(call)
    )


def _of_tensors(tensors: tuple[Any, ...]) -> str:
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
    """Return why the operands' shapes do not do."""
    left, right = call.operands
    if left.dim() < (1 if op == "linear" else 2) or right.dim() < 2:
        return "a vector"
    inner, outer = (right.shape[-1], right.shape[-2]) if op == "linear" else (right.shape[-2], right.shape[-1])
    if not fits(op, left, right):
        return "shapes that torch refuses"
    if left.numel() == 0 or right.numel() == 0:
        return "an empty tensor"
    if op == "addbmm":
        inner = inner * left.shape[0]  # it is summed over the batch too
    return f"dimensions that aren't multiples of {recipe.multiple}" if inner % recipe.multiple or outer % recipe.multiple else ""


def _of_gradient(call: ProductCall) -> str:
    if not _grad_enabled() or not any(each.requires_grad for each in call.tensors):
        return ""
    if _exporting():
        # an exported graph has no autograd.Function: the steps of the rounding would be differentiated
        return "torch.export where a gradient is needed (export under torch.no_grad())"
    if call.added is not None and call.beta == 0 and call.added.requires_grad:
        return "beta=0 with an input that needs a gradient"  # which is 0, where FP8 would give none
    return ""
