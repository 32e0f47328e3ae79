"""The formats that tensors are packed into: bfloat16, and eight bits with scales for each block of 128 elements."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..casting import exponent_for, with_exponent
from ..torch_private import pack_rows, unpack_rows

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
BLOCK = 128  # elements that share a scale
LEAST = 4096  # elements; of fewer, packing takes longer than they are worth
# Elements that are packed at once, so that what is needed beside them is small.
_AT_ONCE_ON_CPU, _AT_ONCE = 2**18, 2**24

# torch's own, taken before anything is patched
_abs, _add, _all, _amax, _amin, _and, _clamp, _copysign = (
    torch.abs, torch.add, torch.all, torch.amax, torch.amin, torch.logical_and, torch.clamp, torch.copysign,
)  # fmt: skip
_div, _empty, _eq, _full_like, _gt, _isfinite, _isnan = (
    torch.div, torch.empty, torch.eq, torch.full_like, torch.gt, torch.isfinite, torch.isnan,
)  # fmt: skip
_minimum, _mul, _norm, _not, _round, _sub, _where = (
    torch.minimum, torch.mul, torch.linalg.vector_norm, torch.logical_not, torch.round, torch.sub, torch.where,
)  # fmt: skip
_and_, _copy_, _div_, _mul_, _shift_left_ = Tensor.bitwise_and_, Tensor.copy_, Tensor.div_, Tensor.mul_, Tensor.bitwise_left_shift_
_clone, _float, _item, _narrow, _numel, _to, _view = (
    Tensor.clone, Tensor.float, Tensor.item, Tensor.narrow, Tensor.numel, Tensor.to, Tensor.view,
)  # fmt: skip

_INF, _NAN = float("inf"), float("nan")
_Part = tuple[Tensor, ...]


class Format(NamedTuple):
    """How blocks are packed: `pack` takes them as rows and gives tensors, `unpack` writes what these stand for into rows.

    `takes` are the dtypes of what is packed. NaN and Inf come back as they are, and what is finite stays finite. `pack` is told where
    nothing of that can be among the rows, which takes it half of the time.
    """

    name: str
    takes: frozenset[torch.dtype]
    pack: Callable[[Tensor, bool], _Part]
    unpack: Callable[[_Part, Tensor], object]


class Packed(NamedTuple):
    """A tensor of one dimension, packed: pieces of it in order, and the elements behind the last whole block as they were."""

    format: Format
    dtype: torch.dtype
    length: int
    parts: tuple[_Part, ...]
    rest: Tensor

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.rest.nbytes + sum(t.nbytes for part in self.parts for t in part)


def pack(flat: Tensor, form: Format) -> Packed:
    """`flat`, a contiguous tensor of one dimension, in the format; a copy of it where it has fewer elements than LEAST."""
    length = _numel(flat)
    whole = length - length % BLOCK if length >= LEAST else 0
    usual = bool(whole) and flat.is_cpu and _is_usual(flat)
    parts = tuple(form.pack(rows, usual) for rows in _pieces(flat, whole))
    return Packed(form, flat.dtype, length, parts, _clone(_narrow(flat, 0, whole, length - whole)))


def unpack(packed: Packed) -> Tensor:
    """The tensor that was packed, as far as the format can tell."""
    out = _empty(packed.length, dtype=packed.dtype, device=packed.rest.device)
    rest = _numel(packed.rest)
    for part, rows in zip(packed.parts, _pieces(out, packed.length - rest), strict=True):
        packed.format.unpack(part, rows)
    if rest:
        _copy_(_narrow(out, 0, packed.length - rest, rest), packed.rest)
    return out


def _pieces(flat: Tensor, whole: int) -> list[Tensor]:
    """The first `whole` elements, in pieces whose rows are blocks."""
    step = _AT_ONCE_ON_CPU if flat.is_cpu else _AT_ONCE
    if whole == _numel(flat) <= step:
        return [_view(flat, -1, BLOCK)] if whole else []
    return [_view(_narrow(flat, 0, start, min(step, whole - start)), -1, BLOCK) for start in range(0, whole, step)]


def _is_usual(flat: Tensor) -> bool:
    """Whether all numbers are finite, none is near the ends of its dtype's range, and not all are tiny. Asked of the CPU alone: another
    device would have to be waited for."""
    # of bfloat16 as of float32: their range is the same, and a wider result takes five times as long
    norm = float(_item(_norm(flat, dtype=torch.float32) if flat.dtype is torch.float16 else _norm(flat)))
    return norm <= _LARGEST[flat.dtype] and (norm == 0 or norm > _TINY * math.sqrt(_numel(flat)))


_TINY = 1e-6
# The largest magnitude that no format rounds up to Inf.
_LARGEST = {dtype: 1.875 * 2.0 ** (15 if dtype is torch.float16 else 127) for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class _Scratch(threading.local):
    """Memory of this thread's that is used again: to be given new memory by the system takes longer than to pack it."""

    rows: Tensor | None = None


_scratch = _Scratch()


def _wide(rows: Tensor) -> Tensor:
    """The rows in float32, on a CPU in scratch memory."""
    if not rows.is_cpu:
        return _float(rows)
    if _scratch.rows is None:
        _scratch.rows = _empty(_AT_ONCE_ON_CPU // BLOCK, BLOCK, dtype=torch.float32, device="cpu")
    return _copy_(_narrow(_scratch.rows, 0, 0, rows.shape[0]), rows)


# --- bfloat16: no scale -------------------------------------------------------------------------------------------------------------------


def _bf16_pack(rows: Tensor, usual: bool) -> _Part:
    low = _to(rows, torch.bfloat16)
    if usual:
        return (low,)
    # the largest float32 numbers were rounded to Inf
    return (_where(_isfinite(rows), _clamp(low, _LEAST_BFLOAT16, -_LEAST_BFLOAT16), low),)


_LEAST_BFLOAT16 = torch.finfo(torch.bfloat16).min


def _bf16_unpack(part: _Part, out: Tensor) -> None:
    _copy_(out, part[0])


# --- FP8: e4m3. The scale of a block is the least power of two by which it fits -----------------------------------------------------------
#
# Such a scale changes no mantissa: nothing is rounded twice, and the error is e4m3's own, at most 1/16 of each number. A block with NaN or
# Inf is marked: in it the largest code stands for Inf, and its finite numbers use half of the range.

_MOST = torch.finfo(E4M3).max


def _fp8_scale(amax: Tensor) -> Tensor:
    return with_exponent(exponent_for(amax, E4M3))


def _fp8_pack(rows: Tensor, usual: bool) -> _Part:
    wide, largest = _wide(rows), _LARGEST[rows.dtype]
    if usual:
        scale = _fp8_scale(_amax(_abs(wide), 1, keepdim=True))
        return _to(_div_(wide, scale), E4M3), scale
    finite = _isfinite(wide)
    marked = _not(_all(finite, 1, keepdim=True))
    bounded = _where(finite, _clamp(wide, -largest, largest), 0)
    scale = _mul(_fp8_scale(_amax(_abs(bounded), 1, keepdim=True)), _add(_to(marked, torch.float32), 1))
    codes = _where(finite, _div(bounded, scale), _clamp(wide, -_MOST, _MOST))
    return _to(codes, E4M3), scale, marked


def _fp8_unpack(part: _Part, out: Tensor) -> None:
    codes, scale, *marked = part
    # torch's own conversion takes ten times as long on a CPU: the bits of e4m3 are those of a float16 that is 2**8 times too small
    half = _view(_and_(_shift_left_(_to(_view(codes, torch.int8), torch.int16), 7), -0x4080), torch.float16)
    wide = _mul_(_mul_(_float(half), 2.0**8), scale)
    if marked:
        magnitude = _abs(half)
        special = _where(
            _eq(magnitude, _MOST / 2**8), _copysign(_full_like(wide, _INF), wide), _where(_gt(magnitude, _MOST / 2**8), _NAN, wide)
        )
        wide = _where(marked[0], special, wide)
    _copy_(out, wide)


# --- eight-bit integers: 256 steps from the least to the largest number of a block --------------------------------------------------------
#
# In a block with NaN or Inf three codes stand for these. FBGEMM's kernel adds 1e-8 to the range.

_STEPS, _FEWER_STEPS = 255.0, 252.0
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def _int8_pack(rows: Tensor, usual: bool) -> _Part:
    wide = _wide(rows)
    if usual and pack_rows is not None:
        return (pack_rows(wide),)
    finite = _isfinite(wide)
    low = _amin(_where(finite, wide, _INF), 1, keepdim=True)
    high = _amax(_where(finite, wide, -_INF), 1, keepdim=True)
    nothing = _gt(low, high)
    low, high = _where(nothing, 0, low), _where(nothing, 0, high)
    steps = _where(_all(finite, 1, keepdim=True), _STEPS, _FEWER_STEPS)
    half_range = _sub(_mul(high, 0.5), _mul(low, 0.5))  # the whole one may be beyond float32
    factor = _where(_gt(half_range, 0), _div(steps, half_range), 0)
    codes = _minimum(_round(_mul(_sub(_mul(wide, 0.5), _mul(low, 0.5)), _clamp(factor, max=_LARGEST_FLOAT32))), steps)
    special = _where(_isnan(wide), 255.0, _where(_gt(wide, 0), 254.0, 253.0))
    return _to(_where(finite, codes, special), torch.uint8), _mul(_div(half_range, steps), 2), low, _eq(steps, _FEWER_STEPS)


def _int8_unpack(part: _Part, out: Tensor) -> None:
    if len(part) == 1:
        _copy_(out, unpack_rows(part[0]))
        return
    codes, scale, low, marked = part
    wide = _float(codes)
    special = _where(_eq(wide, 255), _NAN, _where(_eq(wide, 254), _INF, _where(_eq(wide, 253), -_INF, 0.0)))
    most = torch.finfo(out.dtype).max
    value = _clamp(_add(_mul(wide, scale), low), -most, most)
    _copy_(out, _where(_and(marked, _gt(wide, _FEWER_STEPS)), special, value))


_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
FORMATS = {
    form.name: form
    for form in (
        Format("fp8", _FLOATS, _fp8_pack, _fp8_unpack),
        Format("bf16", frozenset({torch.float32}), _bf16_pack, _bf16_unpack),
        Format("int8", _FLOATS, _int8_pack, _int8_unpack),
    )
}
