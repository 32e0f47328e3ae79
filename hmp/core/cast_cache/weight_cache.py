"""Low-precision copies of weights that are used again.

After a write to the weight its copy is wrong. So the copy is an attribute of the weight's storage, whose memory is marked, and every write
access clears the mark (write_marks, R18). The copy is used again while the memory is marked and the weight is the same view of it. Where
memory cannot be marked no copy is kept, and each use casts.

Where a gradient is needed, the uses share the copy's memory and one node of the graph (shared_cast): gradients are summed in the weight's
dtype, as if each use had cast anew.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .. import locks
from ..casting import Tensor, cast, has_float32_gradient
from ..low_kernels import computed_in_float32
from ..torch_private import SharedWeakTensor, in_plain_autograd
from ..torch_private import dispatch_modes as _dispatch_modes
from ..torch_private import graph_task as _graph_task
from ..torch_private import in_no_transform as _in_no_transform
from ..torch_private import stream_of as _stream_of
from ..torch_private import trace_here as _tracing
from . import shared_cast
from .shared_cast import count_hit, node_of
from .write_marks import cache_entry, is_marked, mark, same_view_check, set_cache_entry, storage_of, view_key

# torch's own, taken before anything is patched
_float32, _grad_enabled = torch.float32, torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled
_compiling = torch.compiler.is_dynamo_compiling
_as_strided, _detach = torch.as_strided, Tensor.detach

# By id(): weights that were used once, with a gradient, between two writes, as most are that train. Wrappers of products cast the small
# ones without asking here. In each period of so many backwards this is learnt anew. An id leaves with its weight's entry, as another
# weight may get the same one: by dict.pop, as no code in Python may run while memory is freed, where gloo's threads wait for the GIL.
used_once: dict[int, weakref.ref[_WeightEntry]] = {}
_PERIOD = 32
_backwards = 0

_MOST_SKIPPED = 64  # uses of a weight, at most, between two attempts to keep a copy of it

misses = 0
refused: Counter[tuple[str, str]] = Counter()  # by device and reason
_limit: int | None = None
_lock = locks.RLock()
_at_most: dict[torch.device, int] = {}  # an upper bound: the last exact sum of all copies, and all made since
_epoch = 0  # entries of an earlier epoch are never used


def _nothing() -> None:
    """Return None, as a weak reference to a tensor that does not exist yet would."""


# A node of a weight that was found again: a graph keeps it, because it saves the weight for backward.
_kept_by_graph: Callable[[], Tensor | None] = _nothing


class _WeightEntry:
    """The copy `low` of the weight in one storage, None where none is kept, and what must be true of the weight for it to be used again.

    `pays[trains]` says whether to keep a copy from the first use after a write on, for uses without and with a gradient: True where the
    last such copy was used again. `uses_to_skip` counts down to the next attempt to keep a copy, `failures` the attempts that failed.
    `period` is the period when the weight was last used once, -1 where it was used again then.
    """

    __slots__ = (
        "__weakref__", "dtype", "epoch", "failures", "for_training", "low", "node", "offset", "pays", "period", "reused", "same_view",
        "stream", "uses_to_skip", "version", "view",
    )  # fmt: skip

    def __init__(self, pays: list[bool]) -> None:
        self.low: Tensor | None = None
        # The copy as a node of the graph, which graphs keep alive, and the address of the weight that its gradients flow to: the node keeps
        # the weight alive, and a weak reference to it would forbid torch.utils.swap_tensors().
        self.node: tuple[Callable[[], Tensor | None], int] = _nothing, 0
        self.dtype: torch.dtype | None = None
        self.view: tuple[Any, ...] = ()  # the weight's view_key() when the copy was made
        self.same_view: Callable[[Tensor], bool]
        self.version = self.offset = -1
        self.stream: int | None = None  # that the copy was made on
        self.for_training = self.reused = False
        self.epoch = _epoch
        self.pays = pays
        self.uses_to_skip = self.failures = 0
        self.period = -1

    def note_one_use(self, weight: Tensor) -> None:
        """Note a use with a gradient. If an earlier use in this period was the only one before a write, the weight counts as used once."""
        period = _backwards // _PERIOD
        if self.period == period:
            key = id(weight)
            used_once[key] = weakref.ref(self, functools.partial(used_once.pop, key))
        self.period = period

    def let_go(self) -> None:
        """Frees the copy, and records in `pays` whether it was used again."""
        if self.low is not None:
            self.pays[self.for_training] = self.reused
            self.low, self.node = None, (_nothing, 0)
            _nbytes.pop(id(self), None)


# By id() of their entry, with which they leave: device and bytes of the copies that are kept. Each update is atomic, so needs no lock.
_nbytes: dict[int, tuple[torch.device, int, weakref.ref[_WeightEntry]]] = {}


def low_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` in `dtype`: the copy that is kept where it still has the right values, else a new cast."""
    grad = _grad_enabled()
    trains = grad and weight.requires_grad
    # A trace must contain the cast, not its result. torch.jit's check of a trace compares source lines: every cast is made on this one.
    if _compiling() or _tracing() is not None or (dtype is _float32 and has_float32_gradient(weight)):
        return cast(weight, dtype)
    try:
        entry = getattr(storage_of(weight), "_hmp_cache_entry", None)  # cache_entry(weight), inlined for speed
    except (NotImplementedError, RuntimeError):  # a sparse weight has no storage
        return cast(weight, dtype)
    if trains and type(entry) is _WeightEntry and entry.low is None and entry.version != weight._version and not entry.pays[True]:
        entry.version = weight._version  # written after each use, as most weights that train are: nothing more is to be asked
        entry.note_one_use(weight)
        return cast(weight, dtype)
    if _dispatch_modes() or (trains and not _in_no_transform()):
        return cast(weight, dtype)
    if type(entry) is not _WeightEntry:
        return _cast_and_maybe_keep(weight, dtype, trains, None)
    low = entry.low
    if (
        low is not None
        and entry.dtype is dtype
        and is_marked(weight)
        and weight._version == entry.version
        and weight.storage_offset() == entry.offset
        and (entry.same_view(weight) or _has_same_view(weight, entry))
    ):
        # on Gaudi: torch.accelerator is "hpu", and has the stream of the calling thread; where it does not, there is one stream.
        if entry.stream is not None and entry.stream != _stream_of(weight):
            return cast(weight, dtype)  # the stream that makes the copy may be later than this one
        count_hit()
        entry.reused = True
        if trains:
            return _node_of(weight, low, entry)
        return _detach(low) if grad and low.requires_grad else low
    return _cast_and_maybe_keep(weight, dtype, trains, entry)


def _has_same_view(weight: Tensor, entry: _WeightEntry) -> bool:
    """Return True if the weight is the same view of its memory as when the copy was made."""
    if entry.view != view_key(weight, entry.version):
        return False
    entry.same_view = same_view_check(weight)  # the next use in this mode takes the quick path
    return True


def _is_small(weight: Tensor) -> bool:
    """Return True if a cast is quicker than sharing one."""
    return weight.nbytes < shared_cast.least_weight


def _node_of(weight: Tensor, low: Tensor, entry: _WeightEntry) -> Tensor:
    """Return `low`, the copy in `entry`, as the node of the graph that sums the gradients of the weight's uses.

    A graph keeps the nodes of weights that it saves for backward. A node that it does not save, such as a bias's, would be made again for
    each use: it is kept by the last node that was found, so lives as long as that one's graph does. Only nodes that are older keep others.
    """
    global _kept_by_graph
    if not weight.is_leaf:
        return node_of(weight, low)  # detach_() would leave a node that is kept with the graph from before
    address = weight._cdata
    reference, of = entry.node
    node = reference() if of == address else None
    if node is not None:
        _kept_by_graph = reference
        return node
    node = node_of(weight, low)
    entry.node = SharedWeakTensor(node), address
    keeper: Any = _kept_by_graph()
    if keeper is not None:
        keeper.__dict__.setdefault("_hmp_keeps", {})[address] = node
    return node


def is_node(low: Tensor, weight: Tensor) -> bool:
    """Return True if `low`, which `low_weight` gave for `weight`, sums the gradients of its uses in the dtype of `weight`."""
    entry = cache_entry(weight)
    return type(entry) is _WeightEntry and entry.node[0]() is low


def backward_begins() -> None:
    """To be called when a backward begins."""
    global _backwards
    _backwards += 1
    if not _backwards % _PERIOD:
        used_once.clear()


def _cast_and_maybe_keep(weight: Tensor, dtype: torch.dtype, trains: bool, entry: _WeightEntry | None) -> Tensor:
    """Return `weight` in `dtype`, cast now. The cast is kept where the weight is likely to be used again before it is written."""
    global misses
    if weight.layout is not torch.strided or weight.is_inference() or not in_plain_autograd() or (trains and _is_small(weight)):
        return cast(weight, dtype)
    version = weight._version
    if entry is None or entry.epoch != _epoch:
        # [without, with a gradient]: a weight that trains is written after each use, unless gradients accumulate or layers share it
        entry = _WeightEntry([True, False])
        set_cache_entry(weight, entry)
    elif entry.low is not None:
        entry.reused = entry.reused or entry.dtype is not dtype  # the weight was perhaps not written, only asked for in another dtype
        entry.let_go()
    again = entry.version == version
    likely = entry.pays[trains] or again
    entry.version = version
    if again:
        entry.period = -1
    if trains and not likely:
        return cast(weight, dtype)
    misses += 1
    if entry.uses_to_skip:
        entry.uses_to_skip -= 1
    elif likely and not _in_checkpoint(weight, trains):
        new = _make_copy(weight, dtype, trains, entry)
        if new is not None and (low := new.low) is not None:
            if trains:
                return _node_of(weight, low, new)
            return _detach(low) if low.requires_grad and _grad_enabled() else low
    return cast(weight, dtype)


def _make_copy(weight: Tensor, dtype: torch.dtype, trains: bool, entry: _WeightEntry) -> _WeightEntry | None:
    """Return an entry with a new copy of `weight`, which replaces `entry`; None, counted in `refused`, where no copy may be kept."""
    global _kept_by_graph
    device = weight.device
    is_widened = device.type == "cpu" and dtype in computed_in_float32()  # see in_float32()
    nbytes = weight.numel() * (dtype.itemsize + (torch.float32.itemsize if is_widened else 0))
    if not _has_room(device, nbytes):
        refused[str(device), "limit"] += 1
        return None
    new = _WeightEntry(entry.pays)
    refusal = mark(weight, new)  # marked before the cast: a write during the cast clears the mark
    if refusal:
        refused[str(device), refusal] += 1
        new.version, new.failures, new.uses_to_skip = entry.version, entry.failures + 1, min(2**entry.failures, _MOST_SKIPPED)
        return None
    new.dtype, new.version, new.for_training, new.stream = dtype, weight._version, trains, _stream_of(weight)
    _kept_by_graph = _nothing  # nodes of new copies are not kept by graphs of old ones
    new.view, new.offset, new.same_view = view_key(weight, new.version), int(weight.storage_offset()), same_view_check(weight)
    low = _cast_to_keep(weight, dtype)
    if type(low) is not Tensor:
        return None
    # as the weight's: linear chooses the algorithm for a batch by requires_grad, under no_grad too
    low.requires_grad_(weight.requires_grad)
    if is_widened:
        storage_of(low)._hmp_in_float32 = []
    key = id(new)
    _nbytes[key] = device, nbytes, weakref.ref(new, functools.partial(_nbytes.pop, key))
    new.low = low
    return new


# Elements of a weight that trains from which its copy in float32 is found again: that makes a node of the graph, which takes longer than
# a small cast.
_WORTH_A_NODE = 2**14


def in_float32(low: Tensor, is_used_once: bool = True) -> Tensor:
    """Return `low` in float32 (R11, "No instructions"). Of a weight's copy that is kept, that is kept with it: it is widened once.

    The copy in float32 has the copy's layout of memory, so a view of the one is the same view of the other. Where it trains, the node that
    is made for it rounds the gradient of each use: for an op that uses it several times it is widened anew, and their sum is rounded.
    """
    trains = low.requires_grad and _grad_enabled()
    if type(low) is not Tensor or low.layout is not torch.strided or _compiling() or _tracing() is not None:
        return cast(low, torch.float32)
    if trains and (low.numel() < _WORTH_A_NODE or not is_used_once):
        return cast(low, torch.float32)
    try:
        storage = storage_of(low)
        kept = getattr(storage, "_hmp_in_float32", None)
    except (NotImplementedError, RuntimeError):  # inside torch.func a tensor has no storage
        return cast(low, torch.float32)
    if kept is None or _dispatch_modes() or not in_plain_autograd():
        return cast(low, torch.float32)
    if not kept:
        if low.nbytes != storage.nbytes():
            return cast(low, torch.float32)
        kept.append(_cast_to_keep(low, torch.float32).requires_grad_(low.requires_grad))
    wide: Tensor = kept[0]
    if wide.shape == low.shape and wide.stride() == low.stride():
        if trains:
            return node_of(low, wide)
        return _detach(wide) if wide.requires_grad and _grad_enabled() else wide
    return cast(low, torch.float32) if trains else _as_strided(_detach(wide), low.shape, low.stride(), low.storage_offset())


def _cast_to_keep(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` in `dtype`, outside of any graph, and not an inference tensor."""
    if _inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            return cast(weight, dtype)
    return cast(_detach(weight) if weight.requires_grad and _grad_enabled() else weight, dtype)


# --- checkpoints ----------------------------------------------------------------------------------------------------------


_here = threading.local()


def call_to_run_again(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, the forward of a reentrant checkpoint, inside which no copies of weights that train are kept.

    That forward runs under no_grad, as inference does, and again in backward.
    """
    before, _here.in_reentrant_checkpoint = getattr(_here, "in_reentrant_checkpoint", False), True
    try:
        return function(*args)
    finally:
        _here.in_reentrant_checkpoint = before


def _in_checkpoint(weight: Tensor, trains: bool) -> bool:
    """Return True if a checkpoint runs or recomputes its forward with a weight that trains.

    Checkpoints save memory: no copies are kept then.
    """
    in_backward = _graph_task() != -1
    return in_backward if trains else weight.requires_grad and (in_backward or getattr(_here, "in_reentrant_checkpoint", False))


# --- how much is kept ------------------------------------------------------------------------------------------------------


def _has_room(device: torch.device, nbytes: int) -> bool:
    """Return True if one more copy, of so many bytes, may be kept on a device; it is counted then.

    All copies are added up only where the limit may be reached: to do so for each took longer than the cast, in a model of hundreds of
    weights.
    """
    with _lock:
        bytes_with_it = _at_most.get(device, 0) + nbytes
        if bytes_with_it > limit(device):
            bytes_with_it = bytes_kept(device) + nbytes
        has_room = bytes_with_it <= limit(device)
        if has_room:
            _at_most[device] = bytes_with_it
    return has_room


def bytes_kept(device: torch.device) -> int:
    """Return the bytes of the copies that are kept on a device."""
    return sum(nbytes for of, nbytes in entries() if of == device)


def entries() -> list[tuple[torch.device, int]]:
    """Device and bytes of each copy that is kept."""
    return [(device, nbytes) for device, nbytes, _ in list(_nbytes.values())]


def let_go(weight: Tensor) -> None:
    """Frees the copy of a weight, if one is kept: at once after an optimizer's step, not only at the weight's next use."""
    if _nbytes:
        try:
            entry = cache_entry(weight)
        except (NotImplementedError, RuntimeError):
            return  # a tensor without a storage
        if type(entry) is _WeightEntry:
            entry.let_go()


def clear() -> None:
    """Frees all copies, and makes every entry invalid with what it recorded of its weight's uses."""
    global _epoch, _kept_by_graph
    _epoch += 1
    _kept_by_graph = _nothing
    used_once.clear()
    for _, _, reference in list(_nbytes.values()):
        entry = reference()
        if entry is not None:
            entry.let_go()


def set_limit(most: int | None) -> None:
    """Let copies of weights take at most `most` bytes of a device; None is the default limit. Frees all copies where they take more."""
    global _limit
    _limit = most
    if any(bytes_kept(device) > limit(device) for device in {of for of, _ in entries()}):
        clear()


def limit(device: torch.device) -> int:
    """Return the most bytes that copies of weights may take on a device."""
    return _default_limit(device) if _limit is None else _limit


@functools.cache
def _default_limit(device: torch.device) -> int:
    """In bytes: a quarter of the device's memory, of the machine's where the device does not report its own."""
    tell = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return (_memory() if tell is None else int(tell(device)[1])) // 4


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30
