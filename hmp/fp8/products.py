"""The products that can run in FP8, each with its op's own arguments: the result is in the low-precision dtype.

A call that `why_not` has a reason against is not for them. What an op adds to its product (a bias, addmm's input) is added in
the low-precision dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.casting import Tensor, write_out
from ..plug_in_math import in_shape, scaled_sum
from .autograd import Settings, product
from .kernels import is_real
from .quantization import Observer, Recipe

# torch's own, taken before anything is patched
_permute, _reshape = torch.permute, torch.reshape
_expand = Tensor.expand


class ProductCall(NamedTuple):
    """A call's arguments, whatever the op calls them: the operands, how many dimensions they must have, what is added, and the rest."""

    left: Any
    right: Any
    dims: tuple[int, int] = (2, 2)  # of left and of right: at least these
    exactly: bool = True
    added: Any = None
    beta: Any = 1
    alpha: Any = 1
    out: Any = None
    out_dtype: Any = None


def _linear(input: Any, weight: Any, bias: Any = None) -> ProductCall:
    return ProductCall(input, weight, (1, 2), exactly=False, added=bias)


def _matmul(input: Any, other: Any, *, out: Any = None) -> ProductCall:
    return ProductCall(input, other, exactly=False, out=out)


def _rmatmul(input: Any, other: Any) -> ProductCall:
    return _matmul(other, input)


def _mm(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> ProductCall:
    return ProductCall(input, mat2, out=out, out_dtype=out_dtype)


def _bmm(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> ProductCall:
    return ProductCall(input, mat2, (3, 3), out=out, out_dtype=out_dtype)


def _addmm(input: Any, mat1: Any, mat2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall(mat1, mat2, (2, 2), True, input, beta, alpha, out, out_dtype)


def _baddbmm(input: Any, batch1: Any, batch2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall(batch1, batch2, (3, 3), True, input, beta, alpha, out, out_dtype)


def _addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall(batch1, batch2, (3, 3), True, input, beta, alpha, out)


# By op: a function with the op's parameters. It raises TypeError for arguments that products in FP8 do not take.
CALLS: dict[str, Callable[..., ProductCall]] = {
    "linear": _linear,
    "matmul": _matmul,
    "linalg.matmul": _matmul,
    "rmatmul": _rmatmul,
    "mm": _mm,
    "bmm": _bmm,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "addbmm": _addbmm,
}
BROADCAST = frozenset({"matmul", "linalg.matmul", "rmatmul"})  # whose batch dimensions need not be the same


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
    left, right = call.left, call.right
    settings = Settings(op, recipe, low_dtype, is_real(kernel, left.device, recipe), observer, right_is_transposed=op == "linear")
    if op == "linear":
        rows = _reshape(left, (-1, left.shape[-1]))
        result = in_shape(product(rows, right, settings), (*left.shape[:-1], right.shape[0]))
    elif op in BROADCAST:
        result = _broadcast(left, right, settings)
    elif op == "addbmm":  # a sum over the batch is a longer sum over the inner dimension
        side_by_side = _reshape(_permute(left, (1, 0, 2)), (left.shape[1], -1))
        result = product(side_by_side, _reshape(right, (-1, right.shape[2])), settings)
    else:
        result = product(left, right, settings)
    if call.added is not None:
        result = scaled_sum(call.added, call.beta, result, call.alpha)
    if call.out is None:
        return result
    write_out(result, call.out)
    out: Tensor = call.out
    return out


PRODUCTS: dict[str, Callable[..., Tensor]] = {op: functools.partial(_computed, op) for op in CALLS}


def _broadcast(left: Tensor, right: Tensor, settings: Settings) -> Tensor:
    """Return the product of matrices and batches of them, as torch.matmul broadcasts them."""
    if right.dim() == 2:
        rows = _reshape(left, (-1, left.shape[-1]))
        return in_shape(product(rows, right, settings), (*left.shape[:-1], right.shape[1]))
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts, rights = (_reshape(_expand(each, (*batch, *each.shape[-2:])), (-1, *each.shape[-2:])) for each in (left, right))
    return in_shape(product(lefts, rights, settings), (*batch, left.shape[-2], right.shape[-1]))
