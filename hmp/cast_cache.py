"""When a cast made before may be used again: of weights, and of activations that several products take.

A stale copy is a wrong result, so a copy of a weight is used again only while everything says that the weight is what it was: the same
object, `_version`, address and owner of its memory, with no optimizer step, no collective that wrote it, no access of `.data` or of
its storage and no export to numpy or dlpack since. An activation may have views, so of one whose memory was ever given away like that
no copy is used again. What torch cannot see stays unseen here too: memory that a foreign kernel writes by address.

Where a gradient is needed the copies share memory, and each use has a gradient of its own (shared_cast): sums of gradients are made
in the weight's dtype, bit for bit as if each use had been cast anew.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import storages
from .casting import Tensor, cast
from .errors import HmpError
from .shared_cast import functorch_stack, may_share, shared, tracing

Parameter = torch.nn.Parameter
_strided = torch.strided

# torch's own, taken before anything is patched
_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
_compiling = torch.compiler.is_dynamo_compiling
_detach = Tensor.detach
_storage = Tensor.untyped_storage
_data_ptr = Tensor.data_ptr

# Below so many bytes a cast costs less than sharing one: measured, 4 microseconds. In bytes because numel() is an op in a trace.
_WORTH_SHARING = 32768


class CacheInfo(NamedTuple):
    """What the caches hold: copies of weights, their bytes, the most that they may hold, and how often a cast was or was not saved."""

    entries: int
    bytes: int
    limit: int
    hits: int
    misses: int


class _Copy:
    """A weight's copy, and what must still hold of the weight when it is used again.

    It holds the weight's storage object, whose address no other memory gets meanwhile. `owners` counts who else holds that memory: a
    view, `.data`, a flat buffer.
    """

    __slots__ = ("cdata", "copy", "dtype", "nbytes", "owners", "pointer", "storage", "stream", "version", "weight")

    def __init__(self, weight: Tensor, copy: Tensor, storage: Any, forget: Callable[[Any], None]) -> None:
        self.weight = weakref.ref(weight, forget)
        self.version = weight._version
        self.pointer = _data_ptr(weight)
        self.storage = storage
        self.cdata = storage._cdata
        self.owners = 0
        self.stream = storages.stream(weight)
        self.copy = copy
        self.dtype = copy.dtype
        self.nbytes = copy.numel() * copy.element_size()


_lock = threading.RLock()  # a weight may die, and call _forget, while it is held
_copies: dict[int, _Copy] = {}
_by_storage: dict[int, set[int]] = {}
_bytes = 0
_limit: int | None = None
_hits = 0
_misses = 0
# Weights that were cast more than once between two changes of theirs while they needed a gradient: id → weak reference
_used_again: dict[int, weakref.ref[Tensor]] = {}
_seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}


def cast_product_input(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, for an op whose result never shares memory with its inputs; a copy made before where it is still right."""
    kind = type(tensor)
    if kind is Parameter:
        trains = _grad_enabled() and tensor.requires_grad
        if trains and (tensor.layout is not _strided or tensor.nbytes < _WORTH_SHARING):
            return cast(tensor, dtype)  # torch.jit compares lines of source too: every cast that is traced is made in one line
        return _weight(tensor, dtype, trains)
    return _activation(tensor, dtype) if kind is Tensor else cast(tensor, dtype)


def cast_weights(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `cast_product_input`, for an op whose result may share memory with inputs that are no weights."""
    return cast_product_input(tensor, dtype) if type(tensor) is Parameter else cast(tensor, dtype)


def _weight(weight: Tensor, dtype: torch.dtype, trains: bool) -> Tensor:
    global _hits, _misses
    if trains and not (may_share() and _is_used_again(weight)):
        return cast(weight, dtype)
    if _compiling() or tracing() is not None or _dispatch_modes():
        return cast(weight, dtype)  # a trace must hold the cast, not its result; torch.compile's, nothing of this file
    held = _copies.get(id(weight))
    if held is not None:
        if (
            held.weight() is weight
            and held.version == weight._version
            and held.pointer == _data_ptr(weight)
            and held.owners == _use_count(held.cdata) + sys.getrefcount(held.storage)
            and held.dtype is dtype
            and (held.stream is None or (held.stream == storages.stream(weight) and not torch.cuda.is_current_stream_capturing()))
        ):
            _hits += 1
            return _as_found(weight, held.copy, trains)
        _forget(id(weight))
        del held  # it holds the storage
    _misses += 1
    copy = _kept(weight, dtype, trains)
    if copy is None:
        return cast(weight, dtype)
    return _as_found(weight, copy, trains)


def _as_found(weight: Tensor, copy: Tensor, trains: bool) -> Tensor:
    """The copy of `weight`, with a gradient of its own where one is needed."""
    if trains:
        return shared(weight, copy)
    return _detach(copy) if copy.requires_grad and _grad_enabled() else copy


def _is_used_again(weight: Tensor) -> bool:
    """Whether a weight that trains is cast more than once between two changes: in gradient accumulation, or shared by layers."""
    key = id(weight)
    known = _used_again.get(key)
    if known is not None and known() is weight:
        return True
    if _graph_task_id() != -1:
        return False  # a checkpoint's recomputation: whoever uses one has no memory for copies
    try:
        version = weight._version
    except RuntimeError:  # an inference tensor has none
        return False
    seen = _seen.get(key)
    if seen is not None and seen[0]() is weight and seen[1] == version:
        _used_again[key] = weakref.ref(weight, lambda _: _used_again.pop(key, None))
        return True
    _seen[key] = (weakref.ref(weight, lambda _: _seen.pop(key, None)), version)
    return False


_here = threading.local()


def call_to_run_again(function: Callable[..., Any], *args: Any) -> Any:
    """What `function`, a reentrant checkpoint's forward, returns: it keeps no copies, as if it ran with gradients."""
    before, _here.runs_again = getattr(_here, "runs_again", False), True
    try:
        return function(*args)
    finally:
        _here.runs_again = before


def _kept(weight: Tensor, dtype: torch.dtype, trains: bool) -> Tensor | None:
    """A new copy of `weight` that is kept; None where none may be, and in a checkpoint: whoever uses one has no memory for copies."""
    global _bytes
    if (
        (weight.requires_grad and not trains and (getattr(_here, "runs_again", False) or _graph_task_id() != -1))
        or weight.layout is not torch.strided
        or weight.is_inference()
        or functorch_stack() is not None
        or storages.owners(weight) > storages.SOLE_OWNER
        or not storages.is_private(weight)  # memory that is not torch's own: numpy's, a file's, another process's
    ):
        return None
    if _bytes + weight.numel() * dtype.itemsize > cache_limit():
        return None
    if _inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            copy = cast(weight, dtype)
    elif _grad_enabled() and weight.requires_grad:
        copy = cast(_detach(weight), dtype)
    else:
        copy = cast(weight, dtype)
    if type(copy) is not Tensor:
        return None
    # as the weight has it: linear chooses a faster way to compute a batch by that, under no_grad too
    copy.requires_grad_(weight.requires_grad)
    key = id(weight)
    made = _Copy(weight, copy, _storage(weight), lambda _: _forget(key))
    made.owners = _use_count(made.cdata) + sys.getrefcount(made.storage)
    with _lock:
        _forget(key)
        _copies[key] = made
        _by_storage.setdefault(made.cdata, set()).add(key)
        _bytes += made.nbytes
    return copy


# --- activations ----------------------------------------------------------------------------------------------------------


_Slot = tuple[Any, int, Any, Any, int, int]
_EMPTY: _Slot = (None, -1, None, None, 0, 0)
# Where no graph is made: the last activation that was cast, its version, dtype, copy, `_writes` and `privacy`. The copy is dropped
# when the activation dies.
_slot = _EMPTY
# Where a graph is made: id → activation, version, dtype, copy, its version, `_writes` and `privacy`. Weak: the copy lives as long as
# the graph holds it.
_cast_before: dict[int, tuple[weakref.ref[Tensor], int, torch.dtype, weakref.ref[Tensor], int, int, int]] = {}
# How often memory was written in a way that leaves no trace on the tensor
_writes = 0


def _activation(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    global _hits, _misses
    if tensor.layout is not _strided or tensor.nbytes < _WORTH_SHARING:
        return cast(tensor, dtype)
    if not _grad_enabled():
        return cast(tensor, dtype) if _inference_mode() or tensor.is_inference() else _in_slot(tensor, dtype)
    if _compiling() or tensor.is_inference():
        return cast(tensor, dtype)
    key = id(tensor)
    found = _cast_before.get(key)
    if found is not None and found[0]() is tensor and found[1] == tensor._version and found[2] is dtype and found[5] == _writes:
        copy = found[3]()
        if copy is not None and copy._version == found[4] and may_share() and found[6] == storages.privacy(tensor):
            _hits += 1
            if tensor.requires_grad:
                return shared(tensor, _detach(copy))
            return _detach(copy) if copy.requires_grad else copy  # it needed a gradient when the copy was made
    copy = cast(tensor, dtype)
    if type(copy) is Tensor and functorch_stack() is None and (privacy := storages.privacy(tensor)) >= 0 and not storages.is_shared(tensor):
        _misses += 1
        gone = weakref.ref(tensor, lambda _: _cast_before.pop(key, None))
        _cast_before[key] = (gone, tensor._version, dtype, weakref.ref(copy), copy._version, _writes, privacy)
    return copy


def _in_slot(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    global _hits, _misses, _slot
    source, version, in_dtype, copy, writes, privacy = _slot
    if (
        source is not None
        and source() is tensor
        and version == tensor._version
        and in_dtype is dtype
        and not tensor.is_cuda  # another stream may have made it
        and writes == _writes
        and not _compiling()
        and tracing() is None
        and not _dispatch_modes()
        and privacy == storages.privacy(tensor)
    ):
        _hits += 1
        before: Tensor = copy
        return before
    copy = cast(tensor, dtype)
    if (
        type(copy) is Tensor
        and functorch_stack() is None
        and not _compiling()
        and (privacy := storages.privacy(tensor)) >= 0
        and not storages.is_shared(tensor)
    ):
        _misses += 1
        _slot = (weakref.ref(tensor, _empty_slot), tensor._version, dtype, copy, _writes, privacy)
    return copy


def _empty_slot(reference: Any) -> None:
    global _slot
    if _slot[0] is reference:
        _slot = _EMPTY


# --- forgetting -----------------------------------------------------------------------------------------------------------


def _forget(key: int) -> None:
    global _bytes
    with _lock:
        held = _copies.pop(key, None)
        if held is None:
            return
        _bytes -= held.nbytes
        keys = _by_storage.get(held.cdata)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del _by_storage[held.cdata]


def forget(tensor: Tensor) -> None:
    """Copies of what lies in the memory of `tensor` are not used again."""
    storage = storages.storage_of(tensor) if _by_storage else None
    if storage is not None:
        for key in tuple(_by_storage.get(storage._cdata, ())):
            _forget(key)


def written(tensor: Tensor) -> None:
    """The memory of `tensor` was written, and its version does not say so."""
    global _writes
    _writes += 1
    forget(tensor)


def expose(tensor: Tensor, *, for_good: bool = False) -> None:
    """Somebody may write into the memory of `tensor` without a trace from now on: copies of activations in it are not used again.

    Copies of weights are dropped, and kept again when nobody else holds the memory any more; `for_good` says that this does not show.
    """
    forget(tensor)
    storages.expose(tensor, for_good)


def take(tensor: Tensor) -> None:
    """Somebody takes the storage of `tensor`: until they let go of it they may write into it without a trace."""
    forget(tensor)
    storages.take(tensor)


def release(tensor: Tensor) -> None:
    """Nothing here refers to `tensor` any more, not even weakly."""
    global _slot
    key = id(tensor)
    _forget(key)
    for table in (_seen, _used_again, _cast_before):
        table.pop(key, None)
    source = _slot[0]
    if source is not None and source() is tensor:
        _slot = _EMPTY


def clear_cache() -> None:
    """Drops every copy of a weight or an activation that was kept to be used again; the memory is free when nobody else uses it."""
    global _bytes, _slot
    with _lock:
        _copies.clear()
        _by_storage.clear()
        _bytes = 0
    _seen.clear()
    _cast_before.clear()
    _slot = _EMPTY


def revert() -> None:
    """As if nothing had ever been cast."""
    global _hits, _misses
    clear_cache()
    _used_again.clear()
    _hits = _misses = 0


def cache_info() -> CacheInfo:
    """Entries, bytes, limit, hits and misses of the cast caches since torch was last untouched."""
    return CacheInfo(len(_copies), _bytes, cache_limit(), _hits, _misses)


def set_cache_limit(limit: int | None) -> None:
    """At most so many bytes of copies of weights are kept; 0 keeps none, None is the default: a quarter of the machine's memory.

    A float32 weight's copy is half its size, so with copies of all weights a model takes 1.5 times its weights. By default that is so
    for models that fill up to half of the memory; of larger ones the rest is cast at each use.
    """
    global _limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise HmpError(f"set_cache_limit() takes a number of bytes, 0 or more, or None for the default; got {limit!r}")
    _limit = limit
    if _bytes > cache_limit():
        clear_cache()


def cache_limit() -> int:
    """The bytes that copies of weights may take."""
    return _default_limit() if _limit is None else _limit


@functools.cache
def _default_limit() -> int:
    """A quarter of the memory of the device that models run on."""
    return _memory() // 4


def _memory() -> int:
    """Bytes of memory of the device that models run on."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30
