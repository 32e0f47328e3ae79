"""Low-precision copies of activations that several products take: the queries, keys and values of one input.

As with weights, the copy counts while nobody asked for write access to the activation's memory since it was made (write_marks). It lives as
long as the graph holds it; where no graph is made the last one is held, until the activation dies or another one is cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ..casting import Tensor, cast
from ..torch_private import dispatch_modes as _dispatch_modes
from ..torch_private import in_plain_autograd as _may_share
from . import shared_cast
from .shared_cast import shared
from .write_marks import is_marked, mark, noted, shown

# torch's own, taken before anything is patched
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling
_detach = Tensor.detach

# A mark beside other threads costs ten times as much as one in a process with one thread.
WORTH_A_SLOW_MARK = 16 * shared_cast.WORTH_SHARING

hits = 0
misses = 0


def _nothing() -> None:
    """Stands for the weak reference of a copy that is not made yet."""


class _Shared:
    """What must still hold of the activation in one storage when its copy is used again."""

    __slots__ = ("__weakref__", "dtype", "epoch", "low", "low_version", "of")

    def __init__(self, tensor: Tensor, dtype: torch.dtype, version: int) -> None:
        self.dtype = dtype
        self.of = shown(tensor, version)
        self.epoch = _epoch
        self.low: Callable[[], Tensor | None] = _nothing
        self.low_version = -1


_epoch = 0  # what was cast in another one is forgotten
# The copy that was made last where no graph holds it, and the record on the activation's storage: it goes when that dies.
_last: tuple[Tensor | None, weakref.ref[_Shared] | None] = (None, None)


def low_activation(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`: a copy that was made before, where it is still right."""
    global hits
    if tensor.layout is not torch.strided or tensor.nbytes < shared_cast.WORTH_SHARING:
        return cast(tensor, dtype)
    if _compiling() or _dispatch_modes() or not _may_share():
        return cast(tensor, dtype)  # a trace must hold the cast, not its result; a dual tensor's copy has a tangent of its own
    grad = _grad_enabled()
    inference = tensor.is_inference()
    if grad and inference:
        return cast(tensor, dtype)
    found = noted(tensor)
    version = 0 if inference else tensor._version
    if (
        type(found) is _Shared
        and is_marked(tensor)
        and found.dtype is dtype
        and found.epoch == _epoch
        and found.of == shown(tensor, version)
    ):
        low = found.low()
        if low is not None and _version(low) == found.low_version and not (grad and low.is_inference()):
            hits += 1
            if grad and tensor.requires_grad:
                return shared(tensor, _detach(low))
            return _detach(low) if low.requires_grad else low  # it needed a gradient when the copy was made
    return _cast_to_share(tensor, dtype, version, grad)


def _cast_to_share(tensor: Tensor, dtype: torch.dtype, version: int, grad: bool) -> Tensor:
    """`tensor` in `dtype`, cast now; noted where its memory can be marked."""
    global misses, _last
    made = _Shared(tensor, dtype, version)
    # before the cast: what is written from now on shows
    if mark(tensor, made, beside_others=tensor.nbytes >= WORTH_A_SLOW_MARK):
        return cast(tensor, dtype)
    low = cast(tensor, dtype)
    if type(low) is Tensor:
        misses += 1
        made.low_version = _version(low)
        made.low = weakref.ref(low)
        if not grad:
            _last = low, weakref.ref(made, _activation_died)
    return low


def _version(tensor: Tensor) -> int:
    """How often the tensor was written; an inference tensor does not say, and its mark does."""
    return 0 if tensor.is_inference() else tensor._version


def _activation_died(reference: weakref.ref[_Shared]) -> None:
    global _last
    if _last[1] is reference:
        _last = None, None


def clear() -> None:
    """Has no copy be used again that was made before, and frees the one that no graph holds."""
    global _last, _epoch
    _last = None, None
    _epoch += 1
