"""The products that can run in FP8, each with its op's own arguments: the result is in the low-precision dtype.

A call that `why_not` has a reason against is not for them. What an op adds to its product (a bias, addmm's input) is added in
the low-precision dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..casting import Tensor, cast, deliver
from ..torch_private import unsafe_view as _unsafe_view
from .autograd import Quantiser, Settings, product
from .kernels import is_real
from .quantization import Observer, Recipe, quantise

# torch's own, taken before anything is patched
_add, _mul, _permute, _reshape = torch.add, torch.mul, torch.permute, torch.reshape
_expand = Tensor.expand
_compiling = torch.compiler.is_dynamo_compiling


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
    """torch.nn.functional.linear, for an input of any number of dimensions."""
    rows = _reshape(input, (-1, input.shape[-1]))
    result = _shaped(_product("linear", rows, weight, right_is_transposed=True, **how), (*input.shape[:-1], weight.shape[0]))
    return result if bias is None else _add(result, cast(bias, how["low_dtype"]))


def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None, **how: Any) -> Tensor:
    """torch.matmul and `@`, for matrices and batches of them."""
    if other.dim() == 2:
        rows = _reshape(input, (-1, input.shape[-1]))
        result = _shaped(_product("matmul", rows, other, **how), (*input.shape[:-1], other.shape[1]))
    else:
        batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
        lefts, rights = (_reshape(_expand(each, (*batch, *each.shape[-2:])), (-1, *each.shape[-2:])) for each in (input, other))
        result = _shaped(_product("matmul", lefts, rights, **how), (*batch, input.shape[-2], other.shape[-1]))
    return _given(result, out)


def rmatmul(input: Tensor, other: Tensor, **how: Any) -> Tensor:
    """torch.Tensor.__rmatmul__: `other @ input`."""
    return matmul(other, input, **how)


def mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None, **how: Any) -> Tensor:
    """torch.mm."""
    return _given(_product("mm", input, mat2, **how), out)


def bmm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None, **how: Any) -> Tensor:
    """torch.bmm."""
    return _given(_product("bmm", input, mat2, **how), out)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None, **how: Any) -> Tensor:
    """torch.addmm."""
    return _given(_sum(input, beta, _product("addmm", mat1, mat2, **how), alpha), out)


def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None, **how: Any
) -> Tensor:
    """torch.baddbmm."""
    return _given(_sum(input, beta, _product("baddbmm", batch1, batch2, **how), alpha), out)


def addbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None, **how: Any
) -> Tensor:
    """torch.addbmm, as one product: a sum over the batch is a longer sum over the inner dimension."""
    side_by_side = _reshape(_permute(batch1, (1, 0, 2)), (batch1.shape[1], -1))
    one_below_other = _reshape(batch2, (-1, batch2.shape[2]))
    return _given(_sum(input, beta, _product("addbmm", side_by_side, one_below_other, **how), alpha), out)


# By op. Each takes as well, by keyword: `recipe`, `low_dtype` (of the result), `kernel` ("auto", "emulate", "real"), `observer` (called
# with Statistics of each tensor that is quantised; None costs nothing) and `quantiser` (called instead of `quantise` for the operands, as
# they were given: what keeps the copies of weights).
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "matmul": matmul,
    "linalg.matmul": matmul,
    "rmatmul": rmatmul,
    "mm": mm,
    "bmm": bmm,
    "addmm": addmm,
    "baddbmm": baddbmm,
    "addbmm": addbmm,
}


def _product(op: str, left: Tensor, right: Tensor, *, right_is_transposed: bool = False, **how: Any) -> Tensor:
    return product(left, right, _settings(op, left.device, right_is_transposed, **how))


def _settings(
    op: str,
    device: torch.device,
    right_is_transposed: bool,
    *,
    recipe: Recipe,
    low_dtype: torch.dtype,
    kernel: str = "auto",
    observer: Observer | None = None,
    quantiser: Quantiser = quantise,
) -> Settings:
    return Settings(op, recipe, low_dtype, is_real(kernel, device, recipe), observer, quantiser, right_is_transposed)


def _sum(input: Tensor, beta: float, result: Tensor, alpha: float) -> Tensor:
    """Return `beta * input + alpha * result` in the dtype and the shape of `result`.

    As torch has it, a beta of 0 keeps NaN in `input` out.
    """
    if beta == 0:
        return result if alpha == 1 else _mul(result, alpha)
    added = _expand(cast(input, result.dtype), result.shape)
    return _add(added if beta == 1 else _mul(added, beta), result, alpha=alpha)


def _shaped(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a new result in that shape: no view of itself, which in-place code would meet."""
    if result.dim() == len(shape):
        return result
    return _reshape(result, shape) if _compiling() else _unsafe_view(result, torch.Size(shape))  # which Dynamo cannot trace


def _given(result: Tensor, out: Tensor | None) -> Tensor:
    if out is not None:
        deliver(result, out)
    return result if out is None else out
