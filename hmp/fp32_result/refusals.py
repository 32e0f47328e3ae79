"""Why a call cannot have a float32 result: then the caller runs it in the low-precision dtype, where torch's own errors are given too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.casting import CASTABLE, Tensor, left_to_torch
from ..plug_in_math import CALLS, ProductCall, why_not_rest


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
    return _of_tensors(call) or why_not_rest(call, torch.float32)


def _of_tensors(call: ProductCall) -> str:
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
