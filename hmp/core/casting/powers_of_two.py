"""Scales that are powers of two: the least by which what shares one fits an eight-bit format."""

from __future__ import annotations

import torch

from ..torch_private import has_storage

Tensor = torch.Tensor

# torch's own, taken before anything is patched
_add, _bitwise_and, _clamp, _eq, _frexp, _full_like = torch.add, torch.bitwise_and, torch.clamp, torch.eq, torch.frexp, torch.full_like
_gt, _ldexp, _shift_left, _shift_right = torch.gt, torch.ldexp, torch.bitwise_left_shift, torch.bitwise_right_shift
_sub, _where = torch.sub, torch.where
_float, _to, _view = Tensor.float, Tensor.to, Tensor.view

_compiling = torch.compiler.is_dynamo_compiling

_MANTISSA_BITS, BIAS = 23, 127  # of float32


def exponent_for(largest: Tensor, form: torch.dtype) -> Tensor:
    """The biased exponent of the smallest power of two, from 2**-126 on, that as a scale lets `largest` fit the format; int32.

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
    """The power of two in float32 that has that biased exponent."""
    if _has_bits(exponent):
        return _view(_to(_shift_left(exponent, _MANTISSA_BITS), torch.int32), torch.float32)
    return _float(_ldexp(_full_like(exponent, 1, dtype=torch.float64), _sub(exponent, BIAS)))


def _has_bits(tensor: Tensor) -> bool:
    """Whether the tensor can be read as another dtype; one that stands for several, as `is_grads_batched` has gradients, cannot."""
    return _compiling() or has_storage(tensor)
