"""What the graph holds instead of a tensor that an op saves for backward.

Memory that others still hold is not packed: packs would only add to it. So a tensor stays as it is until the graph is its last holder,
which `pack_unheld()` looks for at each later call of a listed op. By then nobody can write it any more, and everything that was kept of
its memory is known: it is packed once. Backward gets rounded numbers in either case, so that they do not depend on who held what, and when.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from .. import locks
from ..torch_private import PYTHONS_OWNERS, memory_of, owners_of_storage, storage_of
from .copies import Unwritten
from .formats import BLOCK, SHORTEST, Format, Packed, pack, unpack
from .packable import How, for_all

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_MOST_HELD = 8  # memories that are found held at one call: what a caller holds for long costs each call little

# torch's own, taken before anything is patched
_as_strided, _clone, _contiguous, _copy_ = Tensor.as_strided, Tensor.clone, Tensor.contiguous, Tensor.copy_
_detach, _empty_strided, _to = Tensor.detach, torch.empty_strided, Tensor.to
_element_size, _is_inference, _numel, _offset = Tensor.element_size, Tensor.is_inference, Tensor.numel, Tensor.storage_offset
_narrow, _size, _stride = Tensor.narrow, Tensor.size, Tensor.stride
_double, _item, _nan_to_num, _square, _sub, _sum = Tensor.double, Tensor.item, torch.nan_to_num, torch.square, torch.sub, torch.sum

_now = time.perf_counter
_LOOKED_AT = 2**16  # elements of which the error of packing is measured


# --- recordings: they get the saved tensors, and the time and bytes of packing ---


class Watcher(Protocol):
    """Receives what ops save for backward under a policy that has it packed."""

    def kept(self, op: str, tensor: Tensor, nbytes: int, left: int) -> Any:
        """Note that an op keeps `nbytes`, those of `tensor` or of all its memory, of which `left` stay for now.

        What it returns is given to `changed`.
        """

    def changed(self, about: Any, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Note that it was packed or unpacked: by how many bytes less is kept, and how long it took.

        `errors` has for each piece two sums of squares, of what packing changed and of the numbers.
        """


watchers: list[Watcher] = []
About = list[tuple[Watcher, Any]]


def tell_kept(op: str, tensor: Tensor, nbytes: int, left: int) -> About:
    """Report to all watchers; return what `changed` takes."""
    return [(watcher, watcher.kept(op, tensor, nbytes, left)) for watcher in watchers]


def tell_changed(about: About, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
    """Report to those that got the keeping."""
    for watcher, each in about:
        watcher.changed(each, saved, seconds, errors)


def _error_of(flat: Tensor, form: Format, row: int, signs: bool) -> tuple[float, float]:
    """Return the sums of squares of what packing changes, and of the finite numbers, of the first elements: of all it would take too long.

    Bits change nothing that backward asks for.
    """
    some = _narrow(flat, 0, 0, min(_numel(flat), max(_LOOKED_AT // row, 1) * row))
    exact = _nan_to_num(_double(some), 0.0, 0.0, 0.0)
    found = exact if form.is_bits else _nan_to_num(_double(unpack(pack(some, form, row, signs))), 0.0, 0.0, 0.0)
    return float(_item(_sum(_square(_sub(found, exact))))), float(_item(_sum(_square(exact))))


# --- what the graph holds ---

# By the storage's address: the memories that are not packed yet, those that were looked at last at the end.
_pending: OrderedDict[int, weakref.ref[Memory]] = OrderedDict()
_lock = locks.RLock()


class Exact:
    """A tensor that is kept as it is."""

    __slots__ = ("_op", "_tensor", "_version")

    def __init__(self, tensor: Tensor, op: str) -> None:
        # of a leaf the object itself, whose memory may be exchanged until backward; an op's result would hold the op's node
        self._tensor = tensor if tensor.is_leaf else _detach(tensor)
        self._version = -1 if _is_inference(tensor) else tensor._version
        self._op = op

    def tensor(self) -> Tensor:
        """Return the tensor; raise RuntimeError where it was written since."""
        if self._version >= 0:
            refuse_written(self._tensor, self._version, self._op)
        return self._tensor


class Window(NamedTuple):
    """Where a tensor's elements are within memory."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def look_of(tensor: Tensor) -> Window:
    """Return the tensor's look at its memory."""
    return Window(tensor.dtype, int(_offset(tensor)), tuple(_size(tensor)), tuple(_stride(tensor)))


class Recast:
    """A low-precision copy of a weight, which is not kept: backward casts the weight again, whose memory is watched."""

    __slots__ = ("_look", "_op", "_weight")

    def __init__(self, weight: Unwritten, look: Window, op: str) -> None:
        self._weight, self._look, self._op = weight, look, op

    def tensor(self) -> Tensor:
        """Return the copy, made again; raise RuntimeError where the weight was written since."""
        weight = self._weight.tensor
        refuse_written(weight, self._weight.version, self._op)
        if not self._weight.holds():
            what = f"{str(weight.dtype).removeprefix('torch.')} {list(_size(weight))}"
            raise RuntimeError(
                f"the weight {what} may have been changed since {self._op} saved it for backward (through .data, numpy, a fused optimizer "
                "or data_ptr()). Hint: change it after backward, or take the op off the saved list"
            )
        low = _to(_detach(weight), self._look.dtype)
        return _as_strided(low, self._look.size, self._look.stride, self._look.offset)


class _Source:
    """Packed memory, and its numbers while several uses of it wait for them."""

    __slots__ = ("__weakref__", "_about", "_flat", "packed", "shared", "strides")

    def __init__(self, packed: Packed, about: About) -> None:
        self.packed = packed
        self.strides: tuple[int, ...] | None = None  # that backward's kernels count on, where the pack has another order
        self.shared = False
        self._about = about
        self._flat: Tensor | None = None

    def flat(self) -> Tensor:
        """Return all numbers, in the order of memory."""
        global _unpacked_last
        flat = self._flat
        if flat is None or flat._version:
            started = _now()
            flat = unpack(self.packed)
            tell_changed(self._about, 0, _now() - started, [])
            if self.shared:
                last = _unpacked_last()
                if last is not None:
                    last._flat = None  # one at most is kept where a graph is
                self._flat, _unpacked_last = flat, weakref.ref(self)
        return flat


def _nothing() -> None:
    """Return None, as a weak reference to a source that does not exist yet would."""


_unpacked_last: Callable[[], _Source | None] = _nothing


class Kept:
    """One tensor that is kept: as it is while its memory is pending, then packed."""

    __slots__ = ("__weakref__", "_memory", "_op", "_written", "alias", "how", "is_leaf", "look", "packed_look", "source", "version")

    def __init__(self, memory: Memory, tensor: Tensor, look: Window, how: How, op: str) -> None:
        self._memory = memory
        self.how = how
        self._op = op
        self.alias: Tensor | None = _detach(tensor)
        self.version = tensor._version
        self.is_leaf = tensor.is_leaf
        self.look = self.packed_look = look
        self.source: _Source | None = None
        self._written = -1

    def tensor(self) -> Tensor:
        """Return what backward gets. Raise RuntimeError if the tensor was written since."""
        alias = self.alias
        if alias is not None:
            with _lock:
                refuse_written(alias, self.version, self._op)
                if self.is_leaf and not self._memory.is_unheld():
                    return alias  # an input or a buffer: alive anyway, and nothing that was computed depends on it
                if self.source is None:
                    self._memory.pack()
        if self._written >= 0:
            raise _written(self.look.dtype, self.look.size, self._written, self.version, self._op)
        assert self.source is not None
        look, strides = self.packed_look, self.source.strides
        found = _as_strided(self.source.flat(), look.size, look.stride, look.offset)
        return found if strides is None else _copy_(_empty_strided(look.size, strides, dtype=look.dtype, device=found.device), found)

    def let_go(self) -> None:
        """Drop the tensor, which is packed; a write until now stays an error."""
        assert self.alias is not None
        if self.alias._version != self.version:
            self._written = self.alias._version
        self.alias = None


class Memory:
    """The memory of tensors that are kept, until it is packed."""

    __slots__ = ("__weakref__", "_address", "_kept", "_packed", "_uses", "about")

    def __init__(self, address: int, about: About) -> None:
        self._address = address
        self._kept: dict[tuple[Window, int, How], weakref.ref[Kept]] = {}
        self._packed: list[weakref.ref[Kept]] = []  # of which others hold the memory still, and may write it
        self._uses = 0
        self.about = about

    def keep(self, tensor: Tensor, how: How, op: str) -> Kept:
        """Return what the graph holds for the tensor; the same for the same tensor, unless that was packed already."""
        look = look_of(tensor)
        known = self._kept.get((look, tensor._version, how))
        kept = None if known is None else known()
        if kept is None:
            kept = Kept(self, tensor, look, how, op)
            self._kept[look, kept.version, how] = weakref.ref(kept)
        self._uses += 1
        return kept

    def is_unheld(self) -> bool:
        """Return True if only saved tensors hold the memory."""
        own = sum(kept.alias is not None for kept in self._living())
        return owners_of_storage(self._address) == own + PYTHONS_OWNERS

    def _living(self) -> list[Kept]:
        return [kept for known in [*self._packed, *self._kept.values()] if (kept := known()) is not None]

    def pack(self) -> None:
        """Pack what was kept of the memory; where nothing else holds it, it is freed."""
        living = [kept for kept in self._living() if kept.alias is not None]
        new = [kept for kept in living if kept.source is None]
        if new:
            for kept, (source, look) in zip(new, _packed(new, self), strict=True):
                source.shared = self._uses > 1
                kept.source, kept.packed_look = source, look
            # somebody may write the memory, and not every write is seen: what is kept later is packed anew
            self._packed = [known for known in (*self._packed, *self._kept.values()) if known() is not None]
            self._kept.clear()
        if self.is_unheld():
            if self.about:
                freed = storage_of(living[0].alias).nbytes() if living[0].alias is not None else 0
                left = {id(kept.source): kept.source.packed.nbytes for kept in living if kept.source is not None}
                tell_changed(self.about, freed - sum(left.values()), 0.0, [])
            for kept in living:
                kept.let_go()
            _pending.pop(self._address, None)  # from now on other memory may have the address


def _packed(kept: list[Kept], memory: Memory) -> list[tuple[_Source, Window]]:
    """Return for each of `kept`, which look at one memory, where its numbers are now.

    All are in one pack of the whole memory, unless they are fewer than it holds, or their rows are others.
    """
    form, signs = for_all(each.how for each in kept)
    aliases = [each.alias for each in kept if each.alias is not None]
    first = aliases[0]
    held = storage_of(first).nbytes() // _element_size(first)
    wanted = {each.look: _numel(alias) for each, alias in zip(kept, aliases, strict=True)}
    if all(alias.dtype is first.dtype for alias in aliases) and (len(wanted) > 1 or held <= _numel(first)) and held <= sum(wanted.values()):
        takers = [pair for pair in zip(kept, aliases, strict=True) if form.scaled and pair[0].how.takes_numbers]
        rows = [rows_in_memory(alias, each.how.by_memory, each.look.offset) for each, alias in takers]
        common = math.gcd(*rows) if rows else BLOCK
        if all(rows) and common >= min(BLOCK // 4, *rows, BLOCK):
            whole = _source(_as_strided(first, (held,), (1,), 0), form, common, signs, memory)
            return [(whole, each.look) for each in kept]
    sources = {}
    for each, alias in zip(kept, aliases, strict=True):
        if each.look not in sources:
            sources[each.look] = _source_of(alias, [other.how for other in kept if other.look == each.look], memory)
    return [sources[each.look] for each in kept]


def _source_of(alias: Tensor, ways: list[How], memory: Memory) -> tuple[_Source, Window]:
    """Return the tensor, which several ops keep, in a pack of its own."""
    form, signs = for_all(ways)
    by_memory = all(way.by_memory for way in ways if way.takes_numbers)
    dense = alias if _is_dense(alias) else _clone(alias)
    row = rows_in_memory(dense, by_memory, 0) if form.scaled else BLOCK
    in_rows = dense if row else _contiguous(dense)
    flat = _as_strided(in_rows, (_numel(alias),), (1,), _offset(in_rows))
    source = _source(flat, form, row or int(_size(alias)[-1]), signs, memory)
    source.strides = None if row else tuple(_stride(dense))
    return source, Window(alias.dtype, 0, tuple(_size(alias)), tuple(_stride(in_rows)))


def _source(flat: Tensor, form: Format, row: int, signs: bool, memory: Memory) -> _Source:
    started = _now()
    packed = pack(flat, form, row, signs)
    if memory.about:
        tell_changed(memory.about, 0, _now() - started, [_error_of(flat, form, row, signs)])
    return _Source(packed, memory.about)


# --- rows ---------------------------------------------------------------------------------------------------------------------------------


def rows_in_memory(tensor: Tensor, by_memory: bool, offset: int) -> int:
    """Return after how many elements of memory, at most, a row of the tensor may begin or end; 0 if its rows do not lie in memory.

    The tensor lies `offset` elements after the memory's begin. A row lies in memory if its elements are side by side.
    """
    size, stride = _size(tensor), _stride(tensor)
    along = _along(size, stride, by_memory)
    if along is None or stride[along] != 1:
        return 0
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


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements lie side by side in memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(_stride(tensor), _size(tensor), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def keep(tensor: Tensor, how: How, op: str) -> Kept:
    """Return what the graph holds for a tensor that the op keeps."""
    address = memory_of(storage_of(tensor))
    with _lock:
        known = _pending.get(address)
        memory = None if known is None else known()
        if memory is None:
            nbytes = storage_of(tensor).nbytes() if watchers else 0
            memory = Memory(address, tell_kept(op, tensor, nbytes, nbytes))
            _pending[address] = weakref.ref(memory)
        return memory.keep(tensor, how, op)


def is_pending(memory: int) -> bool:
    """Return True if a listed op keeps what has that memory (`memory_of` a storage), which is not packed yet."""
    known = _pending.get(memory)
    return known is not None and known() is not None


def any_pending() -> bool:
    """Return True if there is memory that is not packed yet."""
    return bool(_pending)


def pack_unheld() -> None:
    """Pack memory that nothing but the graph holds any more, beginning with what was not looked at for the longest time."""
    with _lock:
        held = 0
        for _ in range(len(_pending)):
            address, known = _pending.popitem(last=False)
            memory = known()
            if memory is None:
                continue
            if memory.is_unheld():
                memory.pack()
            else:
                _pending[address] = known
                held += 1
                if held >= _MOST_HELD:
                    break


def refuse_written(tensor: Tensor, version: int, op: str) -> None:
    """RuntimeError, as torch's own, where a tensor that an op saved for backward was written since it had that version."""
    if tensor._version != version:
        raise _written(tensor.dtype, tuple(_size(tensor)), tensor._version, version, op)


def _written(dtype: torch.dtype, size: tuple[int, ...], now: int, then: int, op: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{str(dtype).removeprefix('torch.')} {list(size)}], which {op} saved for backward, is at version {now}; expected version {then} "
        "instead. Hint: write into a copy of it, x.clone(), or after backward"
    )
