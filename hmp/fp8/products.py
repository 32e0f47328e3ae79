"""The products that can run in FP8, each with its op's own arguments: the result is in the low-precision dtype.

A call that `why_not` has a reason against is not for them. What an op adds to its product (a bias, addmm's input) is added in
the low-precision dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..core.casting import Tensor, write_out
from ..plug_in_math import CALLS, multiplied, scaled_sum
from .autograd import Settings, product
from .kernels import is_real
from .quantization import Observer, Recipe

# torch's own, taken before anything is patched
_permute, _reshape = torch.permute, torch.reshape


def _computed(
    op: str,
    *args: Any,
    recipe: Recipe,
    low_dtype: torch.dtype,
    kernel: str = "auto",
    observer: Observer | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a call of `op` in FP8.

    Args:
        op: the op's id.
        *args: the call's.
        recipe: the scales.
        low_dtype: the dtype of the result.
        kernel: see `is_real`.
        observer: called with the Statistics of each tensor that is quantised.
        **kwargs: the call's.
    """
    call = CALLS[op](*args, **kwargs)
    left, right = call.operands
    settings = Settings(op, recipe, low_dtype, is_real(kernel, left.device, recipe), observer, right_is_transposed=op == "linear")
    if op == "addbmm":  # a sum over the batch is a longer sum over the inner dimension
        side_by_side = _reshape(_permute(left, (1, 0, 2)), (left.shape[1], -1))
        result = product(side_by_side, _reshape(right, (-1, right.shape[2])), settings)
    else:
        result = multiplied(op, left, right, functools.partial(product, settings=settings))
    if call.added is not None:
        result = scaled_sum(call.added, call.beta, result, call.alpha)
    out: Tensor = result if call.out is None else write_out(result, call.out)
    return out


PRODUCTS: dict[str, Callable[..., Tensor]] = {op: functools.partial(_computed, op) for op in CALLS if op != "einsum"}
