"""Low-precision copies of activations that several products take as input: queries, keys and values are computed from one tensor.

As with weights, a copy is used again only while nobody has asked for write access to the activation's memory (write_marks, R18). The
graph keeps the copy alive. Where no graph is made, the last copy is kept until its activation is freed or another one is cast.

A mark takes as long as a cast of 64 KiB, and most activations are the input of one product. So of activations of one size that one kind of
autograd node made, and of which no copy was ever used again, only a few are still marked, to see whether that has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ..casting import Tensor, cast, has_float32_gradient
from ..torch_private import SharedWeakTensor, in_plain_autograd
from ..torch_private import dispatch_modes as _dispatch_modes
from ..torch_private import stream_of as _stream_of
from . import shared_cast
from .shared_cast import count_hit, node_of
from .write_marks import cache_entry, is_marked, mark, view_key

# torch's own, taken before anything is patched
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling
_detach = Tensor.detach

# In bytes. To set a mark takes ten times as long in a process with other Python threads.
WORTH_A_SLOW_MARK = 2**19
# After this many copies of one origin that nobody used again, its activations are cast without the cache, but for one in _LOOK_AGAIN.
_SEEN_ENOUGH = 32
_MOST_ORIGINS = 4096
_LOOK_AGAIN = 31  # a prime: queries, keys and values come in turns of three, and a mark must be set for the first of them

misses = 0


def _no_copy() -> None:
    """Return None, as the weak reference to a copy that does not exist yet would."""


class _ActivationEntry:
    """The copy of the activation in one storage, and what must be true of the activation for the copy to be used again."""

    __slots__ = ("__weakref__", "dtype", "epoch", "low", "low_version", "origin", "stream", "view")

    def __init__(self, tensor: Tensor, dtype: torch.dtype, version: int, origin: _Origin) -> None:
        self.dtype = dtype
        self.origin = origin
        self.view = view_key(tensor, version)
        self.epoch = _epoch
        self.stream: int | None = None
        self.low: Callable[[], Tensor | None] = _no_copy
        self.low_version = -1


_Origin = tuple[int, type]  # bytes, and the kind of the autograd node that made the activation
_unshared: dict[_Origin, int] = {}  # how many copies were made since one was last used again
_epoch = 0  # entries of an earlier epoch are never used
# The last copy made without a graph, and its entry, which the activation's storage owns: the copy is dropped when the entry dies.
_last: tuple[Tensor | None, weakref.ref[_ActivationEntry] | None] = (None, None)


def low_activation(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`: an earlier copy where it still has the right values, else a new cast."""
    # A trace must contain the cast, not its result, and a dual tensor's copy has a tangent of its own. Asked first: torch.jit compares the
    # lines of a trace that was made with gradients with those of one made without.
    if _compiling() or _dispatch_modes() or not in_plain_autograd() or (dtype is torch.float32 and has_float32_gradient(tensor)):
        return cast(tensor, dtype)
    grad = _grad_enabled()
    least = shared_cast.least if grad and tensor.requires_grad else shared_cast.WORTH_KEEPING
    if tensor.layout is not torch.strided or tensor.nbytes < least or tensor.is_nested:  # a nested tensor has no shape
        return cast(tensor, dtype)
    inference = tensor.is_inference()
    if grad and inference:
        return cast(tensor, dtype)
    entry = cache_entry(tensor)
    version = 0 if inference else tensor._version
    if (
        type(entry) is _ActivationEntry
        and is_marked(tensor)
        and entry.dtype is dtype
        and entry.epoch == _epoch
        and entry.view == view_key(tensor, version)
        and (entry.stream is None or entry.stream == _stream_of(tensor))
    ):
        low = entry.low()
        if low is not None and _version(low) == entry.low_version and not (grad and low.is_inference()):
            count_hit()
            _unshared[entry.origin] = 0
            if grad and tensor.requires_grad:
                return node_of(tensor, _detach(low))
            return _detach(low) if low.requires_grad else low  # the activation needed a gradient when the copy was made
    return _cast_to_share(tensor, dtype, version, grad)


def _cast_to_share(tensor: Tensor, dtype: torch.dtype, version: int, grad: bool) -> Tensor:
    """Return `tensor` in `dtype`, cast now, and cached where its memory can be marked."""
    global misses, _last
    origin = tensor.nbytes, type(tensor.grad_fn)
    if len(_unshared) > _MOST_ORIGINS:
        _unshared.clear()
    in_vain = _unshared[origin] = _unshared.get(origin, -1) + 1
    if in_vain >= _SEEN_ENOUGH and in_vain % _LOOK_AGAIN and tensor.nbytes < WORTH_A_SLOW_MARK:
        return cast(tensor, dtype)
    entry = _ActivationEntry(tensor, dtype, version, origin)
    # marked before the cast: a write during the cast clears the mark
    if mark(tensor, entry, beside_others=tensor.nbytes >= WORTH_A_SLOW_MARK):
        return cast(tensor, dtype)
    entry.stream = _stream_of(tensor)
    low = cast(tensor, dtype)
    if type(low) is Tensor:
        misses += 1
        entry.low_version = _version(low)
        entry.low = SharedWeakTensor(low)
        if not grad:
            _last = low, weakref.ref(entry, _entry_died)
    return low


def _version(tensor: Tensor) -> int:
    """Return torch's count of writes to the tensor; 0 for an inference tensor, which has no count and whose writes the mark shows."""
    return 0 if tensor.is_inference() else tensor._version


def _entry_died(reference: weakref.ref[_ActivationEntry]) -> None:
    global _last
    if _last[1] is reference:
        _last = None, None


def clear() -> None:
    """Make every entry invalid, drop the copy that no graph keeps alive, and forget which activations are used once."""
    global _last, _epoch
    _unshared.clear()
    _last = None, None
    _epoch += 1
