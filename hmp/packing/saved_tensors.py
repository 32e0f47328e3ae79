"""What the graph holds instead of a tensor that an op saves for backward.

A tensor is packed when it is saved. Ops that save the same memory share one pack as long as the memory lives and has the same version: the
packs of a memory are noted on its storage. Backward gets the numbers of forward, whatever is written into the memory later.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core import locks
from ..core.saved_tensors import refuse_written, tell_changed, tell_kept, watchers
from ..core.torch_private import storage_of, stream_of
from .copies import Unwritten
from .formats import BLOCK, SHORTEST, Format, Packed, pack, unpack
from .packable import Packing, for_all

Tensor = torch.Tensor

# torch's own, taken before anything is patched
_as_strided, _clone, _contiguous, _copy_ = Tensor.as_strided, Tensor.clone, Tensor.contiguous, Tensor.copy_
_detach, _empty_strided, _to = Tensor.detach, torch.empty_strided, Tensor.to
_is_inference, _numel, _offset = Tensor.is_inference, Tensor.numel, Tensor.storage_offset
_narrow, _size, _stride = Tensor.narrow, Tensor.size, Tensor.stride
_double, _item, _nan_to_num, _square, _sub, _sum = Tensor.double, Tensor.item, torch.nan_to_num, torch.square, torch.sub, torch.sum

_now = time.perf_counter
_LOOKED_AT = 2**16  # elements of which the error of packing is measured


def _error_of(flat: Tensor, form: Format, row: int, signs: bool) -> tuple[float, float]:
    """Return the sums of squares of what packing changes, and of the finite numbers, of the first elements: of all it would take too long.

    Bits change nothing that backward asks for.
    """
    some = _narrow(flat, 0, 0, min(_numel(flat), max(_LOOKED_AT // row, 1) * row))
    exact = _nan_to_num(_double(some), 0.0, 0.0, 0.0)
    found = exact if form.is_bits else _nan_to_num(_double(unpack(pack(some, form, row, signs))), 0.0, 0.0, 0.0)
    return float(_item(_sum(_square(_sub(found, exact))))), float(_item(_sum(_square(exact))))


# --- what the graph holds: the tensor, how to cast a weight again, or numbers in a pack ---

_lock = locks.RLock()


class MemoryLayout(NamedTuple):
    """Where a tensor's elements are within memory."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """Return the elements of memory from the first to the last of the tensor."""
        return max(1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)), 0)


def layout_of(tensor: Tensor) -> MemoryLayout:
    """Return the layout of a tensor."""
    return MemoryLayout(tensor.dtype, int(_offset(tensor)), tuple(_size(tensor)), tuple(_stride(tensor)))


class CastAgain:
    """A low-precision copy of a weight, which is not saved: backward casts the weight again."""

    __slots__ = ("_layout", "_op", "_weight")

    def __init__(self, weight: Unwritten, layout: MemoryLayout, op: str) -> None:
        self._weight, self._layout, self._op = weight, layout, op

    def tensor(self) -> Tensor:
        """Return the copy, made again; raise RuntimeError if the weight was written since."""
        weight = self._weight.tensor
        refuse_written(weight, self._weight.version, self._op)
        if not self._weight.holds():
            what = f"{str(weight.dtype).removeprefix('torch.')} {list(_size(weight))}"
            raise RuntimeError(
                f"the weight {what} may have been changed since {self._op} saved it for backward (through .data, numpy, a fused optimizer "
                "or data_ptr()). Hint: change it after backward, or take the op off the saved list"
            )
        low = _to(_detach(weight), self._layout.dtype)
        return _as_strided(low, self._layout.size, self._layout.stride, self._layout.offset)


class SavedPacked(NamedTuple):
    """A tensor whose numbers are in a pack, at `layout`; `strides` are its own where the pack has another order."""

    pack: _Pack
    layout: MemoryLayout
    strides: tuple[int, ...] | None = None

    def tensor(self) -> Tensor:
        """Return the numbers, as they were saved and as far as the format allows."""
        layout = self.layout
        found = _as_strided(self.pack.numbers(), layout.size, layout.stride, layout.offset)
        if self.strides is None:
            return found
        return _copy_(_empty_strided(layout.size, self.strides, dtype=layout.dtype, device=found.device), found)


class _Pack:
    """Elements that lie side by side in memory, packed for all ops that save them, and their numbers while several uses wait for them."""

    __slots__ = ("__weakref__", "_about", "_content", "_is_shared", "_numbers", "_packings", "_row", "_state", "_was_unpacked", "layout")

    def __init__(self, op: str, tensor: Tensor, flat: Tensor, packing: Packing, row: int) -> None:
        self.layout, self._state = layout_of(flat), _state_of(tensor)
        self._packings, self._row = frozenset({packing}), row  # elements after which a row ends; 0: no numbers share a scale
        self._is_shared = self._was_unpacked = False
        self._numbers: Tensor | None = None
        self._content, seconds, errors = self._pack(flat)
        self._about = tell_kept(op, tensor, self._content.nbytes)
        tell_changed(self._about, 0, seconds, errors)

    def _pack(self, flat: Tensor) -> tuple[Packed, float, list[tuple[float, float]]]:
        started = _now()
        form, signs = for_all(self._packings)
        row = self._row or BLOCK
        content = pack(flat, form, row, signs)
        return content, _now() - started, [_error_of(flat, form, row, signs)] if watchers else []

    def share(self, tensor: Tensor, layout: MemoryLayout, packing: Packing) -> bool:
        """Return True if the tensor's numbers are in the pack, which is made anew where all its uses together need another format."""
        first = layout.offset - self.layout.offset
        # between two backwards a program may write in a way that no version counts
        if self._was_unpacked or self._state != _state_of(tensor) or first < 0 or first + layout.span > self.layout.size[0]:
            return False
        row = _row_in_memory(tensor, packing, first)
        if row is None:
            return False
        with _lock:
            common = math.gcd(self._row, row)
            if 0 < common < min(BLOCK // 4, self._row or BLOCK, row or BLOCK):
                return False  # a scale for so few numbers takes too much
            before = for_all(self._packings), self._row
            self._packings, self._row, self._is_shared = self._packings | {packing}, common, True
            if before != (for_all(self._packings), common):
                content, seconds, errors = self._pack(_as_strided(tensor, self.layout.size, self.layout.stride, self.layout.offset))
                tell_changed(self._about, self._content.nbytes - content.nbytes, seconds, errors)
                self._content = content
            return True

    def numbers(self) -> Tensor:
        """Return all numbers, in the order of memory."""
        global _unpacked_last
        self._was_unpacked = True
        numbers = self._numbers
        if numbers is None or numbers._version:
            started = _now()
            numbers = unpack(self._content)
            tell_changed(self._about, 0, _now() - started, [])
            if self._is_shared:
                last = _unpacked_last()
                if last is not None:
                    last._numbers = None  # one at most is kept where a graph is
                self._numbers, _unpacked_last = numbers, weakref.ref(self)
        return numbers


def _nothing() -> None:
    """Return None, as a weak reference to a pack that does not exist yet would."""


_unpacked_last: Callable[[], _Pack | None] = _nothing


def _state_of(tensor: Tensor) -> tuple[torch.dtype, int, int | None]:
    """Return what is the same for all that share a pack of their memory."""
    return tensor.dtype, tensor._version, stream_of(tensor)


def pack_saved(tensor: Tensor, packing: Packing, op: str) -> SavedPacked:
    """Return what the graph holds for a tensor that the op saves."""
    storage, tensor = storage_of(tensor), _detach(tensor)
    layout = layout_of(tensor)
    known = [found for each in getattr(storage, "_hmp_packs", ()) if (found := each()) is not None]
    for found in known:
        if found.share(tensor, layout, packing):
            return SavedPacked(found, layout._replace(offset=layout.offset - found.layout.offset))
    dense = tensor if layout.span <= _numel(tensor) else _clone(tensor)
    in_rows = dense if _row_in_memory(dense, packing, 0) is not None else _contiguous(dense)
    layout = layout_of(in_rows)
    flat = _as_strided(in_rows, (layout.span,), (1,), layout.offset)
    new = _Pack(op, tensor, flat, packing, _row_in_memory(in_rows, packing, 0) or 0)
    if in_rows is tensor:
        storage._hmp_packs = (*map(weakref.ref, known), weakref.ref(new))
    return SavedPacked(new, layout._replace(offset=0), None if in_rows is dense else tuple(_stride(dense)))


# --- rows ---------------------------------------------------------------------------------------------------------------------------------


def _row_in_memory(tensor: Tensor, packing: Packing, offset: int) -> int | None:
    """Return after how many elements of memory, at most, a row of the tensor may begin or end.

    The tensor lies `offset` elements after the begin. 0: the packing knows no rows. None: the elements of a row don't lie side by side.
    """
    if not packing.form.scaled:
        return 0
    size, stride = _size(tensor), _stride(tensor)
    along = _along(size, stride, packing.by_memory)
    if along is None or stride[along] != 1:
        return None
    return math.gcd(size[along], offset, *(step for at, step in enumerate(stride) if at != along and size[at] != 1))


def row_of(tensor: Tensor, by_memory: bool) -> int:
    """Return the elements of a row of the tensor; 0 if they are too few to share a scale, or one repeated element."""
    size, stride = _size(tensor), _stride(tensor)
    along = _along(size, stride, by_memory)
    return 0 if along is None or size[along] < SHORTEST or not stride[along] else size[along]


def _along(size: torch.Size, stride: tuple[int, ...], by_memory: bool) -> int | None:
    """Return the dimension that the rows run along: the last, or that whose elements lie side by side in memory."""
    if not size:
        return None
    if by_memory:
        return next((at for at in reversed(range(len(size))) if stride[at] == 1 and size[at] != 1), len(size) - 1)
    return len(size) - 1
