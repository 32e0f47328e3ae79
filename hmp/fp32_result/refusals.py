"""Why a call cannot have a float32 result: then the caller runs it in the low-precision dtype, where torch's own errors are given too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.casting import CASTABLE, Tensor, left_to_torch
from .products import CALLS, RoundedCall

_grad_enabled = torch.is_grad_enabled  # torch's own, taken before anything is patched


def why_not(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], low_dtype: torch.dtype) -> str:
    """Return why PRODUCTS[op] cannot take the call, in few words; "" where it can.

    It reads dtypes and the like, never values. There are few different answers, so that they can be counted.
    """
    try:
        call = CALLS[op](*args, **kwargs)
    except TypeError:
        return "arguments that fp32_result does not support"
    if op == "einsum" and len(call.operands) < 2:
        return "an einsum of one operand"
    return _of_tensors(call) or _of_the_rest(call)


def _of_tensors(call: RoundedCall) -> str:
    for tensor in call.tensors:
        if not isinstance(tensor, Tensor):
            return "arguments that fp32_result does not support"
        if tensor.dtype not in CASTABLE:
            return f"a {str(tensor.dtype).removeprefix('torch.')} input"
        if left_to_torch(tensor):
            return "a tensor subclass that refuses casts"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return "a tensor that is not dense"
    return ""


def _of_the_rest(call: RoundedCall) -> str:
    if call.out_dtype is not None:
        return "out_dtype is given"
    if not isinstance(call.beta, (int, float)) or not isinstance(call.alpha, (int, float)):
        return "an alpha or beta that isn't a number"
    if call.out is None:
        return ""
    if not isinstance(call.out, Tensor) or call.out.dtype is not torch.float32 or call.out.layout is not torch.strided:
        return "out= that isn't a dense float32 tensor"
    needs_gradient = _grad_enabled() and any(each.requires_grad for each in call.tensors)
    return "out= where a gradient is needed" if needs_gradient or call.out.requires_grad else ""
