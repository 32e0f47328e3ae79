"""What several plug-ins compute: matrix products, whose arguments and shapes have one form here, and scales that are powers of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .core.casting import Tensor, cast
from .core.torch_private import has_storage, is_any_autocast_enabled, is_autocast_available
from .core.torch_private import unsafe_view as _unsafe_view

# torch's own, taken before anything is patched
_compiling, _grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_add, _bitwise_and, _clamp, _eq, _frexp = torch.add, torch.bitwise_and, torch.clamp, torch.eq, torch.frexp
_full_like, _gt, _ldexp, _mul, _sub, _where = torch.full_like, torch.gt, torch.ldexp, torch.mul, torch.sub, torch.where
_shift_left, _shift_right, _reshape = torch.bitwise_left_shift, torch.bitwise_right_shift, torch.reshape
_expand, _to, _to_float32, _view = Tensor.expand, Tensor.to, Tensor.float, Tensor.view

# --- matrix products ------------------------------------------------------------------------------------------------------


class ProductCall(NamedTuple):
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


def _linear(input: Any, weight: Any, bias: Any = None) -> ProductCall:
    return ProductCall((input, weight), bias)


def _matmul(input: Any, other: Any, *, out: Any = None) -> ProductCall:
    return ProductCall((input, other), out=out)


def _rmatmul(input: Any, other: Any) -> ProductCall:
    return ProductCall((other, input))


def _mm(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> ProductCall:
    return ProductCall((input, mat2), out=out, out_dtype=out_dtype)


def _addmm(input: Any, mat1: Any, mat2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall((mat1, mat2), input, beta, alpha, out, out_dtype)


def _baddbmm(input: Any, batch1: Any, batch2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall((batch1, batch2), input, beta, alpha, out, out_dtype)


def _addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall((batch1, batch2), input, beta, alpha, out)


def _einsum(equation: Any, *operands: Any) -> ProductCall:
    if not isinstance(equation, str):
        raise TypeError("expected an equation as a string")
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return ProductCall(operands, equation=equation)


# By op: a function with the op's parameters. It raises TypeError for arguments that a plug-in can't take.
CALLS: dict[str, Callable[..., ProductCall]] = {
    "linear": _linear,
    "matmul": _matmul,
    "linalg.matmul": _matmul,
    "rmatmul": _rmatmul,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "addbmm": _addbmm,
    "einsum": _einsum,
}
# How many dimensions both operands have, where an op takes no other number.
_DIMS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3, "addbmm": 3}


def fits(op: str, left: Tensor, right: Tensor) -> bool:
    """Return True if the op takes both, as matrices or as batches of matrices that broadcast; a left vector is one row."""
    if right.dim() < 2 or left.dim() < 1 or left.shape[-1] != right.shape[-1 if op == "linear" else -2]:
        return False
    if op in _DIMS and (left.dim(), right.dim()) != (_DIMS[op], _DIMS[op]):
        return False
    if right.dim() == 2:
        return True
    if op in _DIMS:
        return bool(left.shape[0] == right.shape[0])
    pairs = zip(reversed(left.shape[:-2]), reversed(right.shape[:-2]), strict=False)
    return op != "linear" and left.dim() > 1 and all(one == other or one == 1 or other == 1 for one, other in pairs)


def multiplied(op: str, left: Tensor, right: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the op's product of operands that fit. `multiply` takes two matrices, or two batches of as many."""
    columns = right.shape[-2 if op == "linear" else -1]
    if right.dim() == 2:
        rows = left if left.dim() == 2 else _reshape(left, (-1, left.shape[-1]))
        return in_shape(multiply(rows, right), (*left.shape[:-1], columns))
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts, rights = (_batches(each, batch) for each in (left, right))
    return in_shape(multiply(lefts, rights), (*batch, left.shape[-2], columns))


def _batches(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Return the tensor as one batch of matrices, its batch dimensions broadcast."""
    if tensor.dim() == 3 and tensor.shape[:1] == batch:
        return tensor
    return _reshape(_expand(tensor, (*batch, *tensor.shape[-2:])), (-1, *tensor.shape[-2:]))


def why_not_rest(call: ProductCall, *out_dtypes: torch.dtype) -> str:
    """Return why a plug-in can't take the arguments besides the operands, `out=` of other dtypes among them; "" where it can."""
    if call.out_dtype is not None:
        return "out_dtype is given"
    if not isinstance(call.beta, (int, float)) or not isinstance(call.alpha, (int, float)):
        return "an alpha or beta that isn't a number"
    if call.out is None:
        return ""
    if not isinstance(call.out, Tensor) or call.out.dtype not in out_dtypes or call.out.layout is not torch.strided:
        return "out= of another kind"
    needs_gradient = _grad_enabled() and any(each.requires_grad for each in call.tensors)
    return "out= where a gradient is needed" if needs_gradient or call.out.requires_grad else ""


def outside_autocast(device: torch.device, compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `compute(*args)`, of whose tensors torch.autocast, where it is on, would take its own dtype."""
    if is_any_autocast_enabled() and is_autocast_available(device.type):
        with torch.autocast(device.type, enabled=False):
            return compute(*args)
    return compute(*args)


def scaled_sum(input: Tensor, beta: float, result: Tensor, alpha: float) -> Tensor:
    """Return `beta * input + alpha * result` in the dtype and the shape of `result`.

    As torch has it, a beta of 0 keeps NaN in `input` out.
    """
    added = _expand(cast(input, result.dtype), result.shape)  # an error of torch's where it does not fit
    if beta == 0:
        return result if alpha == 1 else _mul(result, alpha)
    return _add(added if beta == 1 else _mul(added, beta), result, alpha=alpha)


def in_shape(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a new result in that shape: no view of itself, which in-place code would meet."""
    if result.dim() == len(shape):
        return result
    return _reshape(result, shape) if _compiling() else _unsafe_view(result, torch.Size(shape))  # which Dynamo cannot trace


# --- scales that are powers of two ----------------------------------------------------------------------------------------

_MANTISSA_BITS, BIAS = 23, 127  # of float32


def exponent_for(largest: Tensor, form: torch.dtype) -> Tensor:
    """Return the biased exponent, in int32, of the smallest power of two, from 2**-126 on, that lets `largest` fit the format.

    It is read from the bits of `largest`: a logarithm in float32 misses it next to a power of two. The largest number of each format is
    1.75 times a power of two, so a larger mantissa needs the next one.
    """
    if _has_bits(largest):
        bits = _view(largest, torch.int32)
        above = _gt(_bitwise_and(bits, (1 << _MANTISSA_BITS) - 1), 3 << (_MANTISSA_BITS - 2))
        exponent = _to(_shift_right(bits, _MANTISSA_BITS), torch.int32)  # XLA shifts into int64
    else:
        mantissa, exponent = _frexp(largest)  # from 0.5 up to 1
        above, exponent = _gt(mantissa, 0.875), _add(exponent, BIAS - 1)
    exponent = _sub(_add(exponent, _to(above, torch.int32)), 8 if form is torch.float8_e4m3fn else 15)
    return _where(_eq(largest, 0), _full_like(exponent, BIAS), _clamp(exponent, min=1))


def with_exponent(exponent: Tensor) -> Tensor:
    """Return the power of two in float32 that has that biased exponent."""
    if _has_bits(exponent):
        return _view(_to(_shift_left(exponent, _MANTISSA_BITS), torch.int32), torch.float32)
    return _to_float32(_ldexp(_full_like(exponent, 1, dtype=torch.float64), _sub(exponent, BIAS)))


def _has_bits(tensor: Tensor) -> bool:
    """Return True if the tensor can be read as another dtype; one that is several, as `is_grads_batched` has gradients, cannot."""
    return _compiling() or has_storage(tensor)
