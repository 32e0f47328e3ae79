"""Low-precision copies of weights that are used again.

A copy is a wrong result once the weight was written, so it lives on the weight's storage, with a mark that every write access to that
memory clears (write_marks): a copy is used again while the mark stands and the weight shows that memory as it did.
Where no mark can be set no copy is kept; a cast at each use is always right.

Where a gradient is needed the copies share memory, and each use has a gradient of its own (shared_cast): sums of gradients are made
in the weight's dtype, bit for bit as if each use had been cast anew.
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

from ..casting import Tensor, cast
from ..torch_private import dispatch_modes as _dispatch_modes
from ..torch_private import graph_task as _graph_task
from ..torch_private import in_plain_autograd as _may_share
from ..torch_private import trace_here as _tracing
from . import shared_cast
from .shared_cast import shared
from .write_marks import is_marked, looks_as_now, mark, note, noted, shown, storage_of

# torch's own, taken before anything is patched
_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled
_compiling = torch.compiler.is_dynamo_compiling
_detach = Tensor.detach

_PATIENCE = 64  # the most uses of a weight between two tries to keep a copy of it

hits = 0
misses = 0
refused: Counter[str] = Counter()
_limit: int | None = None
_epoch = 0  # what is known from another one is forgotten


class _Copy:
    """What is kept of the weight in one storage: `low`, its copy, and what must still hold of the weight when that is used again.

    `low` is None where no copy is kept. `pays` is whether it is worth to keep one from the first use after a write on, without and with
    gradients: whether the last one was ever used again. `rest` is how many uses to let pass before the next try, `tries` how many failed.
    """

    __slots__ = (
        "__weakref__", "dtype", "epoch", "looks_as_then", "low", "of", "offset", "pays", "rest", "training", "tries", "used", "version",
    )  # fmt: skip

    def __init__(self, pays: list[bool]) -> None:
        self.low: Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.of: tuple[Any, ...] = ()  # `shown` when the copy was made
        self.looks_as_then: Callable[[Tensor], bool]
        self.version = self.offset = -1
        self.training = self.used = False
        self.epoch = _epoch
        self.pays = pays
        self.rest = self.tries = 0

    def let_go(self) -> None:
        """Keeps the copy no longer, and whether it was worth it in mind."""
        if self.low is not None:
            self.pays[self.training] = self.used
            self.low = None
            _nbytes.pop(id(self), None)


# The copies that are alive, and their bytes. One step each, so that threads, and a thread that dies in one, need no lock.
_alive: dict[int, weakref.ref[_Copy]] = {}
_nbytes: dict[int, int] = {}


def low_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`: a copy that was made before, where it is still right."""
    global hits
    grad = _grad_enabled()
    trains = grad and weight.requires_grad
    # a trace must hold the cast, not its result, and compares lines of source: all its casts are made in this one
    if _compiling() or _tracing() is not None or _dispatch_modes() or (trains and (_is_small(weight) or not _may_share())):
        return cast(weight, dtype)
    try:
        kept = getattr(storage_of(weight), "_hmp_noted", None)  # `noted`, written out: this is asked at each use
    except (NotImplementedError, RuntimeError):  # a sparse weight has no storage
        return cast(weight, dtype)
    if type(kept) is not _Copy:
        return _missed(weight, dtype, trains, None)
    low = kept.low
    if (
        low is not None
        and kept.dtype is dtype
        and is_marked(weight)
        and weight._version == kept.version
        and weight.storage_offset() == kept.offset
        and (kept.looks_as_then(weight) or _looks_the_same(weight, kept))
    ):
        hits += 1
        kept.used = True
        if trains:
            return shared(weight, low)
        return _detach(low) if grad and low.requires_grad else low
    return _missed(weight, dtype, trains, kept)


def _looks_the_same(weight: Tensor, kept: _Copy) -> bool:
    """Whether the weight shows its memory as when the copy was made."""
    if kept.of != shown(weight, kept.version):
        return False
    kept.looks_as_then = looks_as_now(weight)  # the answer is quicker the next time in this mode
    return True


def _is_small(weight: Tensor) -> bool:
    """Whether a cast costs less than sharing one, which has a node of autograd's for each use."""
    return weight.layout is not torch.strided or weight.nbytes < shared_cast.WORTH_SHARING


def _for_use(weight: Tensor, low: Tensor, trains: bool) -> Tensor:
    """The copy of `weight`, with a gradient of its own where one is needed."""
    if trains:
        return shared(weight, low)
    return _detach(low) if low.requires_grad and _grad_enabled() else low


def _missed(weight: Tensor, dtype: torch.dtype, trains: bool, kept: _Copy | None) -> Tensor:
    """`weight` in `dtype`, cast now; a copy is kept where the weight is likely to be used again before it is written."""
    global misses
    if weight.layout is not torch.strided or weight.is_inference() or not _may_share():
        return cast(weight, dtype)
    version = weight._version
    if kept is None or kept.epoch != _epoch:
        # a weight that trains is written after each use, unless gradients are accumulated or layers share it
        kept = _Copy([True, False])
        note(weight, kept)
    elif kept.low is not None:
        kept.used = kept.used or kept.dtype is not dtype  # it was not written, but asked for in another dtype
        kept.let_go()
    likely = kept.pays[trains] or kept.version == version
    kept.version = version
    if trains and not likely:
        return cast(weight, dtype)
    misses += 1
    if kept.rest:
        kept.rest -= 1
    elif likely and not _runs_again(weight, trains):
        low = _keep(weight, dtype, trains, kept)
        if low is not None:
            return _for_use(weight, low, trains)
    return cast(weight, dtype)


def _keep(weight: Tensor, dtype: torch.dtype, trains: bool, kept: _Copy) -> Tensor | None:
    """A new copy of `weight` that is kept in the place of `kept`; None, counted in `refused`, where none may be."""
    nbytes = weight.numel() * dtype.itemsize
    if bytes_kept() + nbytes > limit():
        refused["limit"] += 1
        return None
    new = _Copy(kept.pays)
    refusal = mark(weight, new)  # before the cast: what is written from now on shows
    if refusal:
        refused[refusal] += 1
        new.version, new.tries, new.rest = kept.version, kept.tries + 1, min(2**kept.tries, _PATIENCE)
        return None
    new.dtype, new.version, new.training = dtype, weight._version, trains
    new.of, new.offset, new.looks_as_then = shown(weight, new.version), int(weight.storage_offset()), looks_as_now(weight)
    low = _cast_to_keep(weight, dtype)
    if type(low) is not Tensor:
        return None
    # as the weight has it: linear chooses a faster way to compute a batch by that, under no_grad too
    low.requires_grad_(weight.requires_grad)
    key = id(new)
    _alive[key] = weakref.ref(new, functools.partial(_died, key))
    _nbytes[key] = nbytes
    new.low = low
    return low


def _cast_to_keep(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`, no part of any graph and of no inference."""
    if _inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            return cast(weight, dtype)
    return cast(_detach(weight) if weight.requires_grad and _grad_enabled() else weight, dtype)


def _died(key: int, _: object) -> None:
    _alive.pop(key, None)
    _nbytes.pop(key, None)


# --- checkpoints ----------------------------------------------------------------------------------------------------------


_here = threading.local()


def call_to_run_again(function: Callable[..., Any], *args: Any) -> Any:
    """What `function`, a reentrant checkpoint's forward, returns: it keeps no copies, as if it ran with gradients."""
    before, _here.runs_again = getattr(_here, "runs_again", False), True
    try:
        return function(*args)
    finally:
        _here.runs_again = before


def _runs_again(weight: Tensor, trains: bool) -> bool:
    """Whether this is a checkpoint's forward or recomputation for a weight that trains: whoever uses one has no memory for copies."""
    in_backward = _graph_task() != -1
    return in_backward if trains else weight.requires_grad and (in_backward or getattr(_here, "runs_again", False))


# --- how much is kept -----------------------------------------------------------------------------------------------------


def bytes_kept() -> int:
    """The bytes of all copies."""
    return sum(_nbytes.values())


def entries() -> int:
    """How many copies are kept."""
    return len(_nbytes)


def let_go(weight: Tensor) -> None:
    """Frees the copy of a weight that was just written, if there is one; it would be found out, but only when the weight is used."""
    if _nbytes:
        try:
            kept = noted(weight)
        except (NotImplementedError, RuntimeError):
            return  # a tensor without a storage
        if type(kept) is _Copy:
            kept.let_go()


def clear() -> None:
    """Frees all copies, and forgets how weights were used."""
    global _epoch
    _epoch += 1
    for reference in list(_alive.values()):
        kept = reference()
        if kept is not None:
            kept.let_go()


def set_limit(most: int | None) -> None:
    """Has copies of weights take so many bytes at most; None is the default."""
    global _limit
    _limit = most
    if bytes_kept() > limit():
        clear()


def limit() -> int:
    """The bytes that copies of weights may take."""
    return _default_limit() if _limit is None else _limit


@functools.cache
def _default_limit() -> int:
    """A quarter of the memory of the device that models run on."""
    return _memory() // 4


def _memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30
