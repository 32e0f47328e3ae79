"""The formats that tensors are packed into: bfloat16, eight bits with a scale for each block of a row, and one or two bits for signs."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core.torch_private import pack_rows, unpack_rows
from ..plug_in_math import exponent_for, with_exponent

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
BLOCK = 128  # elements that share a scale, at most: a block ends where its row does
SHORTEST = 4  # elements of a row: with a scale for fewer, packing saves next to nothing
_LONG = 64  # elements of a block from which int8's scale and offset, eight bytes, are few compared with them
LEAST = 4096  # elements; of fewer, packing takes longer than they are worth
# Elements that are packed at once, so that what is needed besides is small.
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
_any, _cat, _ge, _le, _lt, _ne, _sign, _shift_right = (
    torch.any, torch.cat, torch.ge, torch.le, torch.lt, torch.ne, torch.sign, torch.bitwise_right_shift,
)  # fmt: skip
_abs_, _clamp_ = Tensor.abs_, Tensor.clamp_
_and_, _copy_, _div_, _mul_, _or_ = Tensor.bitwise_and_, Tensor.copy_, Tensor.div_, Tensor.mul_, Tensor.bitwise_or_
_clone, _contiguous, _float, _item, _narrow = Tensor.clone, Tensor.contiguous, Tensor.float, Tensor.item, Tensor.narrow
_numel, _reshape, _shift_left_, _to, _view = Tensor.numel, Tensor.reshape, Tensor.bitwise_left_shift_, Tensor.to, Tensor.view

_INF, _NAN = float("inf"), float("nan")
_Part = tuple[Tensor, ...]


class Format(NamedTuple):
    """How blocks are packed: `pack` takes them as rows and gives tensors, `unpack` writes what these mean into rows.

    `takes` are the dtypes of what is packed. NaN and Inf come back as they are, and what is finite stays finite. `pack` is given whether
    the numbers are `usual` (see `_is_usual`), which takes it half of the time, and whether `signs` must come back exactly: then no number
    is rounded to zero or across it.
    """

    name: str
    takes: frozenset[torch.dtype]
    pack: Callable[[Tensor, bool, bool], _Part]
    unpack: Callable[[_Part, Tensor], object]

    @property
    def is_bits(self) -> bool:
        """Return True if it keeps the answer to one question alone, not the numbers."""
        return self.name not in FORMATS

    @property
    def scaled(self) -> bool:
        """Return True if the numbers of a block share a scale."""
        return self is FP8 or self is INT8


class Packed(NamedTuple):
    """A tensor of one dimension, packed: pieces of it in order, and the elements after the last whole block as they were.

    Where blocks of one length do not fill a row, `padded_row` has its elements, and those that it was made up to.
    """

    format: Format
    dtype: torch.dtype
    length: int
    block: int
    parts: tuple[_Part, ...]
    rest: Tensor
    padded_row: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Return what it takes."""
        return self.rest.nbytes + sum(t.nbytes for part in self.parts for t in part)


def pack(flat: Tensor, form: Format, row: int = BLOCK, signs: bool = False) -> Packed:
    """Pack `flat`, a contiguous tensor of one dimension, in the format; a copy of it where it has fewer elements than LEAST.

    Args:
        flat: the numbers.
        form: the format.
        row: after so many elements a new row begins, whose numbers share no scale with those of another.
        signs: whether signs and zeros must come back exactly.
    """
    length = _numel(flat)
    if length < LEAST:
        return Packed(form, flat.dtype, length, BLOCK, (), _clone(flat))
    block = _block_of(row)
    if not block:
        return _pack_padded(flat, form, row, signs)
    if form is INT8 and (block < _LONG or signs):
        form = FP8
    whole = length - length % block
    usual = flat.is_cpu and not form.is_bits and _is_usual(flat)
    parts = tuple(form.pack(rows, usual, signs) for rows in _pieces(flat, whole, block))
    return Packed(form, flat.dtype, length, block, parts, _clone(_narrow(flat, 0, whole, length - whole)))


def _pack_padded(flat: Tensor, form: Format, row: int, signs: bool) -> Packed:
    """Return `pack`, of rows that blocks of one length do not fill: the last number of each is repeated until they do."""
    count = -(-row // BLOCK)
    padded = -(-row // count) * count
    rows = _view(_narrow(flat, 0, 0, _numel(flat) // row * row), -1, row)
    more = _cat([rows, _narrow(rows, 1, row - 1, 1).expand(-1, padded - row)], 1)
    packed = pack(_view(more, -1), form, padded // count, signs)
    rest = _numel(flat) % row
    return packed._replace(length=_numel(flat), rest=_clone(_narrow(flat, 0, _numel(flat) - rest, rest)), padded_row=(row, padded))


@functools.lru_cache
def _block_of(row: int) -> int:
    """Return the greatest length of blocks that fill a row; 0 where those would be short."""
    return row if row <= BLOCK else next((block for block in range(BLOCK, _LONG - 1, -1) if not row % block), 0)


def unpack(packed: Packed) -> Tensor:
    """Return the tensor that was packed, as far as the format allows."""
    rest = _numel(packed.rest)
    whole = packed.length - rest
    if packed.padded_row is not None:
        row, padded = packed.padded_row
        wide = _empty(whole // row, padded, dtype=packed.dtype, device=packed.rest.device)
        _unpack_into(packed, _view(wide, -1))
        return _cat([_reshape(_narrow(wide, 1, 0, row), -1), packed.rest])
    out = _empty(packed.length, dtype=packed.dtype, device=packed.rest.device)
    _unpack_into(packed, _narrow(out, 0, 0, whole))
    if rest:
        _copy_(_narrow(out, 0, whole, rest), packed.rest)
    return out


def _unpack_into(packed: Packed, out: Tensor) -> None:
    for part, rows in zip(packed.parts, _pieces(out, _numel(out), packed.block), strict=True):
        packed.format.unpack(part, rows)


def _pieces(flat: Tensor, whole: int, block: int) -> list[Tensor]:
    """Return the first `whole` elements, in pieces whose rows are blocks."""
    step = _AT_ONCE_ON_CPU if flat.is_cpu else _AT_ONCE
    step -= step % block
    if whole == _numel(flat) <= step:
        return [_view(flat, -1, block)] if whole else []
    return [_view(_narrow(flat, 0, start, min(step, whole - start)), -1, block) for start in range(0, whole, step)]


def _is_usual(flat: Tensor) -> bool:
    """Return True if all numbers are finite, none is near the ends of its dtype's range, and not all are tiny.

    Asked of the CPU alone: another device would have to be waited for.
    """
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
    """Return the rows in float32, on a CPU in scratch memory."""
    if not rows.is_cpu:
        return _float(rows)
    if _scratch.rows is None:
        _scratch.rows = _empty(_AT_ONCE_ON_CPU, dtype=torch.float32, device="cpu")
    return _copy_(_view(_narrow(_scratch.rows, 0, 0, _numel(rows)), rows.shape), rows)


# --- bfloat16: no scale -------------------------------------------------------------------------------------------------------------------


def _bf16_pack(rows: Tensor, usual: bool, signs: bool) -> _Part:
    low = _to(rows, torch.bfloat16)
    if not usual:  # the largest float32 numbers were rounded to Inf
        low = _where(_isfinite(rows), _clamp(low, _LEAST_BFLOAT16, -_LEAST_BFLOAT16), low)
    if signs:
        low = _to(_mul_(_clamp(_abs(_float(low)), min=_TINIEST_BFLOAT16), _sign(rows)), torch.bfloat16)
    return (low,)


_TINIEST_BFLOAT16 = 2.0**-133
_LEAST_BFLOAT16 = torch.finfo(torch.bfloat16).min


def _bf16_unpack(part: _Part, out: Tensor) -> None:
    _copy_(out, part[0])


# --- FP8: e4m3. The scale of a block is the least power of two by which it fits -----------------------------------------------------------
#
# Such a scale changes no mantissa: nothing is rounded twice, and the error is e4m3's own, at most 1/16 of each number. It is kept as its
# exponent, a byte. A block with NaN or Inf is marked: in it the largest code means Inf, and its finite numbers use half of the range.

_MOST = torch.finfo(E4M3).max


def _fp8_pack(rows: Tensor, usual: bool, signs: bool) -> _Part:
    wide, largest = _wide(rows), _LARGEST[rows.dtype]
    if usual:
        exponent = exponent_for(_amax(_abs(wide), 1, keepdim=True), E4M3)
        codes = _codes(wide, with_exponent(exponent), signs)
        return _to(codes, E4M3), _to(exponent, torch.uint8)
    finite = _isfinite(wide)
    marked = _not(_all(finite, 1, keepdim=True))
    bounded = _where(finite, _clamp(wide, -largest, largest), 0)
    exponent = _add(exponent_for(_amax(_abs(bounded), 1, keepdim=True), E4M3), _to(marked, torch.int32))
    special = _clamp(wide, -_MOST, _MOST)
    codes = _where(finite, _codes(bounded, with_exponent(exponent), signs), special)
    return _to(codes, E4M3), _to(exponent, torch.uint8), marked


def _codes(wide: Tensor, scale: Tensor, signs: bool) -> Tensor:
    """Return the numbers over the scale, in their place; where signs are asked for, none but zero is less than the least code."""
    if not signs:
        return _div_(wide, scale)
    sign = _sign(wide)
    return _mul_(_clamp_(_abs_(_div_(wide, scale)), min=2.0**-9), sign)


def _fp8_unpack(part: _Part, out: Tensor) -> None:
    codes, exponent, *marked = part
    scale = with_exponent(_to(exponent, torch.int32))
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
# In a block with NaN or Inf three codes mean these. FBGEMM's kernel adds 1e-8 to the range, so it is not for small ones.

_STEPS, _FEWER_STEPS = 255.0, 252.0
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def _int8_pack(rows: Tensor, usual: bool, signs: bool) -> _Part:
    wide = _wide(rows)
    if usual and pack_rows is not None:
        packed = pack_rows(wide)
        steps = _view(_contiguous(_narrow(packed, 1, rows.shape[1], 4)), torch.float32)
        if not _item(_any(_and(_gt(steps, 0), _lt(steps, _TINY)))):
            return (packed,)
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


# --- bits: of each number what backward asks of it, as numbers that answer the same -------------------------------------------------------
#
# Eight bits make a byte by one product of eight bytes: no two of its terms meet in the highest one.

_GATHER, _SPREAD, _PLACES, _ONES = 0x0102040810204080, 0x0101010101010101, -0x7FBFDFEFF7FBFDFF, 0x7F7F7F7F7F7F7F7F


def _to_bits(true: Tensor) -> Tensor:
    return _to(_shift_right(_mul(_view(true, torch.int64), _GATHER), 56), torch.uint8)


def _from_bits(bits: Tensor) -> Tensor:
    """As 0 and 1, in int8."""
    places = _and_(_mul(_to(bits, torch.int64), _SPREAD), _PLACES)
    # a byte with one bit is made 1: what is added carries into its highest bit, which is put down
    low = _add(_and_(_clone(places), _ONES), _ONES)
    return _view(_and_(_shift_right(_or_(low, places), 7), _SPREAD), torch.int8)


def _positive_pack(rows: Tensor, usual: bool, signs: bool) -> _Part:
    return (_to_bits(_not(_le(rows, 0))),)


def _positive_unpack(part: _Part, out: Tensor) -> None:
    _copy_(out, _from_bits(*part))


def _sign_pack(rows: Tensor, usual: bool, signs: bool) -> _Part:
    return _to_bits(_not(_le(rows, 0))), _to_bits(_not(_ge(rows, 0)))  # of NaN both


def _sign_unpack(part: _Part, out: Tensor) -> None:
    above, below = map(_from_bits, part)
    _copy_(out, _where(_eq(_add(above, below), 2), _NAN, _sub(above, below)))


def _noise_pack(rows: Tensor, usual: bool, signs: bool) -> _Part:
    return _to_bits(_ne(rows, 0)), _amax(rows)


def _noise_unpack(part: _Part, out: Tensor) -> None:
    _mul_(_copy_(out, _from_bits(part[0])), part[1])


_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
FP8 = Format("fp8", _FLOATS, _fp8_pack, _fp8_unpack)
BF16 = Format("bf16", frozenset({torch.float32}), _bf16_pack, _bf16_unpack)
INT8 = Format("int8", _FLOATS, _int8_pack, _int8_unpack)
# The recipes.
FORMATS = {form.name: form for form in (FP8, BF16, INT8)}
# For a backward that asks whether a number is above zero, NaN counted so; for its sign; and for one that takes a dropout's mask, whose
# numbers are 0 or one other.
POSITIVE = Format("positive", _FLOATS, _positive_pack, _positive_unpack)
SIGN = Format("sign", _FLOATS, _sign_pack, _sign_unpack)
NOISE = Format("noise", _FLOATS, _noise_pack, _noise_unpack)
