"""What several plug-ins compute: scales that are powers of two, and the result of a product."""

from __future__ import annotations

import torch

from .core.casting import Tensor, cast
from .core.torch_private import has_storage
from .core.torch_private import unsafe_view as _unsafe_view

# torch's own, taken before anything is patched
_compiling = torch.compiler.is_dynamo_compiling
_add, _bitwise_and, _clamp, _eq, _frexp = torch.add, torch.bitwise_and, torch.clamp, torch.eq, torch.frexp
_full_like, _gt, _ldexp, _mul, _sub, _where = torch.full_like, torch.gt, torch.ldexp, torch.mul, torch.sub, torch.where
_shift_left, _shift_right, _reshape = torch.bitwise_left_shift, torch.bitwise_right_shift, torch.reshape
_expand, _to, _to_float32, _view = Tensor.expand, Tensor.to, Tensor.float, Tensor.view

# --- what is made of a product's result ---------------------------------------------------------------------------------


def scaled_sum(input: Tensor, beta: float, result: Tensor, alpha: float) -> Tensor:
    """Return `beta * input + alpha * result` in the dtype and the shape of `result`.

    As torch has it, a beta of 0 keeps NaN in `input` out.
    """
    if beta == 0:
        return result if alpha == 1 else _mul(result, alpha)
    added = _expand(cast(input, result.dtype), result.shape)
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
