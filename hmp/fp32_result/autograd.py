"""One matrix product that autograd differentiates: low-precision inputs, sums and result in float32, in forward and in backward."""

from __future__ import annotations

from typing import Any

import torch

from ..core.casting import Tensor, cast, dtype_name, has_float32_gradient
from ..core.torch_private import TORCH
from ..errors import HmpError
from ..plug_in_math import outside_autocast

# torch's own, taken before anything is patched
_bmm, _float, _mm, _transpose = torch.bmm, Tensor.float, torch.mm, torch.transpose
_grad_enabled = torch.is_grad_enabled

# mm(out_dtype=) and bmm(out_dtype=). They raise on the CPU, and up to torch 2.9 for fake tensors. On ROCm and XPU they were not tried.
_CUDA_HAS_OUT_DTYPE = TORCH >= (2, 10) and not torch.version.hip


def product(left: Tensor, right: Tensor, low_dtype: torch.dtype, right_is_transposed: bool) -> Tensor:
    """Return `left @ right` in float32, of two matrices or two batches of as many, both rounded to `low_dtype`.

    Args:
        left: (rows, inner).
        right: (inner, outer), or with `right_is_transposed` (outer, inner), as a linear layer's weight is.
        low_dtype: The dtype that both are rounded to.
        right_is_transposed: See `right`.
    """
    if _grad_enabled() and (left.requires_grad or right.requires_grad):
        result: Tensor = _RoundedProduct.apply(left, right, low_dtype, right_is_transposed)  # type: ignore[no-untyped-call]
        return result
    low_right = cast(right, low_dtype)
    return _multiply(cast(left, low_dtype), _transposed(low_right) if right_is_transposed else low_right)


class _RoundedProduct(torch.autograd.Function):
    """Saves each operand whose partner needs a gradient, in the low-precision dtype: two bytes an element.

    Backward rounds the gradient of the result to that dtype, so that its two products have low-precision inputs too. Their results are
    float32: the gradient of a float32 input is not rounded.
    """

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, low_dtype: torch.dtype, right_is_transposed: bool) -> Tensor:
        low_left, low_right = cast(left, low_dtype), cast(right, low_dtype)
        ctx.low_dtype, ctx.right_is_transposed = low_dtype, right_is_transposed
        ctx.dtypes = _gradient_dtype(left), _gradient_dtype(right)
        ctx.save_for_backward(low_right if ctx.needs_input_grad[0] else None, low_left if ctx.needs_input_grad[1] else None)
        return _multiply(low_left, _transposed(low_right) if right_is_transposed else low_right)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if _grad_enabled():
            raise HmpError(
                f"a {dtype_name(ctx.low_dtype)} product with a float32 result cannot be differentiated twice, and create_graph=True asks "
                "for that; take its op off the fp32_result list, or call it inside hmp.disable_casts()"
            )
        low_right, low_left = ctx.saved_tensors  # read once: the hooks of a checkpoint give each saved tensor a single time
        low = cast(gradient, ctx.low_dtype)
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            outer_by_inner = low_right if ctx.right_is_transposed else _transposed(low_right)
            of_left = cast(_multiply(low, outer_by_inner), ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            first, second = (low, low_left) if ctx.right_is_transposed else (low_left, low)
            of_right = cast(_multiply(_transposed(first), second), ctx.dtypes[1])
        return of_left, of_right, None, None


def _gradient_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if has_float32_gradient(tensor) else tensor.dtype


def _transposed(tensor: Tensor) -> Tensor:
    return _transpose(tensor, -2, -1)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the float32 product of two low-precision matrices or batches."""
    return outside_autocast(left.device, _multiplied, left, right)


def _multiplied(left: Tensor, right: Tensor) -> Tensor:
    multiply = _mm if left.dim() == 2 else _bmm
    if _CUDA_HAS_OUT_DTYPE and left.is_cuda:
        return multiply(left, right, out_dtype=torch.float32)
    return multiply(_float(left), _float(right))
