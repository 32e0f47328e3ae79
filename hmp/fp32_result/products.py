"""The matrix products that can have a float32 result, each with its op's own arguments.

The operands are rounded to the low-precision dtype. What an op adds to its product (a bias, addmm's input) isn't: it is added in float32.
A call that `why_not` has a reason against is not for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.casting import Tensor, cast, write_out
from ..core.torch_private import in_plain_autograd, is_any_autocast_enabled, is_autocast_available, is_traced
from ..plug_in_math import in_shape, scaled_sum
from .autograd import product
from .einsum import Contraction, contraction

# torch's own, taken before anything is patched
_permute, _reshape, _expand = torch.permute, torch.reshape, Tensor.expand
_linear, _matmul, _mm, _bmm = torch.nn.functional.linear, torch.matmul, torch.mm, torch.bmm
_addmm, _baddbmm, _einsum = torch.addmm, torch.baddbmm, torch.einsum
_compiling, _exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting
_Parameter = torch.nn.Parameter


class RoundedCall(NamedTuple):
    """A call's arguments, whatever the op calls them: the operands, what is added, and the rest."""

    operands: tuple[Any, ...]
    added: Any = None
    beta: Any = 1
    alpha: Any = 1
    out: Any = None
    out_dtype: Any = None
    equation: str = ""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Return the operands and what is added."""
        return self.operands if self.added is None else (*self.operands, self.added)


def _linear_call(input: Any, weight: Any, bias: Any = None) -> RoundedCall:
    return RoundedCall((input, weight), bias)


def _matmul_call(input: Any, other: Any, *, out: Any = None) -> RoundedCall:
    return RoundedCall((input, other), out=out)


def _rmatmul_call(input: Any, other: Any) -> RoundedCall:
    return RoundedCall((other, input))


def _mm_call(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> RoundedCall:
    return RoundedCall((input, mat2), out=out, out_dtype=out_dtype)


def _addmm_call(input: Any, mat1: Any, mat2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> RoundedCall:
    return RoundedCall((mat1, mat2), input, beta, alpha, out, out_dtype)


def _baddbmm_call(
    input: Any, batch1: Any, batch2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> RoundedCall:
    return RoundedCall((batch1, batch2), input, beta, alpha, out, out_dtype)


def _einsum_call(equation: Any, *operands: Any) -> RoundedCall:
    if not isinstance(equation, str):
        raise TypeError("expected an equation as a string")
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return RoundedCall(operands, equation=equation)


# By op: a function with the op's parameters. It raises TypeError for arguments that are not supported here.
CALLS: dict[str, Callable[..., RoundedCall]] = {
    "linear": _linear_call,
    "matmul": _matmul_call,
    "linalg.matmul": _matmul_call,
    "rmatmul": _rmatmul_call,
    "mm": _mm_call,
    "bmm": _mm_call,
    "addmm": _addmm_call,
    "baddbmm": _baddbmm_call,
    "einsum": _einsum_call,
}


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
    if call.out is None:
        return result
    write_out(result, call.out)
    out: Tensor = call.out
    return out


PRODUCTS: dict[str, Callable[..., Tensor]] = {op: functools.partial(_computed, op) for op in CALLS}


def _may_be_one_function(call: RoundedCall) -> bool:
    """Return True if an autograd function may compute the call: of plain tensors, in no transform, and in no exported graph.

    A beta of 0 gives what is added a gradient of zeros, and keeps its NaN out: that is left to torch.
    """
    if _exporting() or (call.added is not None and call.beta == 0):
        return False
    if _compiling():
        return all(type(each) in (Tensor, _Parameter) for each in call.tensors)
    return in_plain_autograd() and all(type(each) in (Tensor, _Parameter) or is_traced(each) for each in call.tensors)


def _as_one_product(op: str, call: RoundedCall, low_dtype: torch.dtype) -> Tensor | None:
    """Return the call's result by one product of matrices or batches; None where it isn't one, or torch refuses its shapes."""
    if len(call.operands) != 2:
        return None
    left, right = call.operands
    if left.numel() == 0 or right.numel() == 0:
        return None
    if op == "einsum":
        return _contracted(left, right, contraction(call.equation, tuple(left.shape), tuple(right.shape)), low_dtype)
    if not _fits(op, left, right):
        return None
    is_linear = op == "linear"
    columns = right.shape[-2 if is_linear else -1]
    if right.dim() == 2:
        rows = left if left.dim() == 2 else _reshape(left, (-1, left.shape[-1]))
        result = in_shape(product(rows, right, low_dtype, is_linear), (*left.shape[:-1], columns))
    else:
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        lefts, rights = (_batches(each, batch) for each in (left, right))
        result = in_shape(product(lefts, rights, low_dtype, False), (*batch, left.shape[-2], columns))
    return result if call.added is None else scaled_sum(call.added, call.beta, result, call.alpha)


# How many dimensions an op's operands have, where it takes no other number.
_DIMS = {"mm": (2, 2), "addmm": (2, 2), "bmm": (3, 3), "baddbmm": (3, 3)}


def _fits(op: str, left: Tensor, right: Tensor) -> bool:
    """Return True if the op takes both, as matrices or as batches of matrices that broadcast; a left vector is one row."""
    if right.dim() < 2 or left.dim() < 1 or left.shape[-1] != right.shape[-1 if op == "linear" else -2]:
        return False
    if op in _DIMS and (left.dim(), right.dim()) != _DIMS[op]:
        return False
    if right.dim() == 2:
        return True
    if op in _DIMS:
        return bool(left.shape[0] == right.shape[0])
    pairs = zip(reversed(left.shape[:-2]), reversed(right.shape[:-2]), strict=False)
    return op != "linear" and left.dim() > 1 and all(one == other or one == 1 or other == 1 for one, other in pairs)


def _batches(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Return the tensor as one batch of matrices, its batch dimensions broadcast."""
    if tensor.dim() == 3 and tensor.shape[:1] == batch:
        return tensor
    return _reshape(_expand(tensor, (*batch, *tensor.shape[-2:])), (-1, *tensor.shape[-2:]))


def _contracted(left: Tensor, right: Tensor, how: Contraction | None, low_dtype: torch.dtype) -> Tensor | None:
    if how is None:
        return None
    lefts = _reshape(_permute(left, how.left_order), how.left_shape)
    rights = _reshape(_permute(right, how.right_order), how.right_shape)
    return _permute(in_shape(product(lefts, rights, low_dtype, False), tuple(how.shape)), how.order)


# --- torch's own ops in float32: for transforms, exported graphs, tensor subclasses, and calls that aren't one product -------------------

_WITHOUT_MORE: dict[str, Callable[..., Tensor]] = {"matmul": _matmul, "linalg.matmul": _matmul, "rmatmul": _matmul, "mm": _mm, "bmm": _bmm}
_WITH_INPUT: dict[str, Callable[..., Tensor]] = {"addmm": _addmm, "baddbmm": _baddbmm}


def _by_casts(op: str, call: RoundedCall, low_dtype: torch.dtype) -> Tensor:
    """Return what torch's op gives in float32 for rounded operands.

    Backward multiplies in float32 too, and the casts then round the gradients of the operands to the low-precision dtype.
    """
    operands = [cast(cast(each, low_dtype), torch.float32) for each in call.operands]
    added = None if call.added is None else cast(call.added, torch.float32)
    device = operands[0].device.type
    if is_any_autocast_enabled() and is_autocast_available(device):
        with torch.autocast(device, enabled=False):
            return _in_torch(op, call, operands, added)
    return _in_torch(op, call, operands, added)


def _in_torch(op: str, call: RoundedCall, operands: list[Tensor], added: Tensor | None) -> Tensor:
    if op == "linear":
        return _linear(operands[0], operands[1], added)
    if op == "einsum":
        return _einsum(call.equation, *operands)
    if op in _WITH_INPUT:
        return _WITH_INPUT[op](added, *operands, beta=call.beta, alpha=call.alpha)
    return _WITHOUT_MORE[op](*operands)
