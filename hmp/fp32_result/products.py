"""The matrix products that can have a float32 result, each with its op's own arguments.

The operands are rounded to the low-precision dtype. What an op adds to its product (a bias, addmm's input) isn't: it is added in float32.
A call that `why_not` has a reason against is not for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.casting import Tensor, cast, write_out
from ..core.torch_private import in_plain_autograd, is_traced
from ..plug_in_math import CALLS, ProductCall, fits, multiplied, outside_autocast, scaled_sum
from .autograd import product

# torch's own, taken before anything is patched
_linear, _matmul, _mm, _bmm = torch.nn.functional.linear, torch.matmul, torch.mm, torch.bmm
_addmm, _baddbmm, _einsum = torch.addmm, torch.baddbmm, torch.einsum
_compiling, _exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting
_Parameter = torch.nn.Parameter


def needs_casts(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the call cannot be an autograd function of one product.

    That is so in transforms, in exported graphs, and for tensor subclasses. The caller asks this where Dynamo calls it, and has Dynamo
    trace the product: in a trace transforms cannot be seen.
    """
    return not _may_be_one_function(CALLS[op](*args, **kwargs))


def _computed(op: str, *args: Any, low_dtype: torch.dtype, by_casts: bool | None = None, **kwargs: Any) -> Tensor:
    """Compute a call of `op` with a float32 result.

    Args:
        op: The op's id.
        *args: The call's.
        low_dtype: The dtype that the operands are rounded to.
        by_casts: What `needs_casts` returned. None: it is asked here.
        **kwargs: The call's.
    """
    call = CALLS[op](*args, **kwargs)
    if by_casts is None:
        by_casts = not _may_be_one_function(call)
    result = None if by_casts else _as_one_product(op, call, low_dtype)
    if result is None:
        result = _by_casts(op, call, low_dtype)
    out: Tensor = result if call.out is None else write_out(result, call.out)
    return out


PRODUCTS: dict[str, Callable[..., Tensor]] = {op: functools.partial(_computed, op) for op in CALLS if op != "addbmm"}


def _may_be_one_function(call: ProductCall) -> bool:
    """Return True if an autograd function may compute the call: of plain tensors, in no transform, and in no exported graph.

    A beta of 0 gives what is added a gradient of zeros, and keeps its NaN out: that is left to torch.
    """
    if _exporting() or (call.added is not None and call.beta == 0):
        return False
    if _compiling():
        return all(type(each) in (Tensor, _Parameter) for each in call.tensors)
    return in_plain_autograd() and all(type(each) in (Tensor, _Parameter) or is_traced(each) for each in call.tensors)


def _as_one_product(op: str, call: ProductCall, low_dtype: torch.dtype) -> Tensor | None:
    """Return the call's result by one product of matrices or batches; None where it isn't one, or torch refuses its shapes."""
    if op == "einsum":
        return None
    left, right = call.operands
    if left.numel() == 0 or right.numel() == 0 or not fits(op, left, right):
        return None
    multiply = functools.partial(product, low_dtype=low_dtype, right_is_transposed=op == "linear")
    result = multiplied(op, left, right, multiply)
    return result if call.added is None else scaled_sum(call.added, call.beta, result, call.alpha)


# --- torch's own ops in float32: for transforms, exported graphs, tensor subclasses, einsum -------------------

_IN_TORCH: dict[str, Callable[..., Tensor]] = {
    "matmul": _matmul, "linalg.matmul": _matmul, "rmatmul": _matmul, "mm": _mm, "bmm": _bmm, "addmm": _addmm, "baddbmm": _baddbmm,
}  # fmt: skip


def _by_casts(op: str, call: ProductCall, low_dtype: torch.dtype) -> Tensor:
    """Return what torch's op gives in float32 for rounded operands.

    Backward multiplies in float32 too, and the casts then round the gradients of the operands to the low-precision dtype.
    """
    operands = [cast(cast(each, low_dtype), torch.float32) for each in call.operands]
    added = None if call.added is None else cast(call.added, torch.float32)
    return outside_autocast(operands[0].device, _in_torch, op, call, operands, added)


def _in_torch(op: str, call: ProductCall, operands: list[Tensor], added: Tensor | None) -> Tensor:
    if op == "linear":
        return _linear(operands[0], operands[1], added)
    if op == "einsum":
        return _einsum(call.equation, *operands)
    if added is not None:
        return _IN_TORCH[op](added, *operands, beta=call.beta, alpha=call.alpha)
    return _IN_TORCH[op](*operands)
