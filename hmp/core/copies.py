"""Copies in another dtype of weights and activations that are used again inside one call (R18, R21).

Only what requires a gradient has copies, as under torch.autocast. Inputs, buffers, frozen weights and all that inference computes may be
written by numpy, a collective or a kernel that no tensor counts; each of their uses is a cast of its own.

A copy lives inside the outermost `casts()` block or call of a model of its thread (`active.state.Running`), and is used again there while
the version and the address of what it was made of are the same, and no optimizer has stepped. Nothing outlives that call but what a graph
holds: between calls code writes weights, too, in ways that no tensor counts (`.data`, numpy, C++). Elsewhere, and in traces, transforms and
other code's dispatch modes, each use is a cast of its own.

A weight that is used once is cast and forgotten: of which weights a copy pays is learnt from the calls before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .active import state
from .casting import TO, Tensor, cast, has_float32_gradient
from .torch_private import WeakTensor, dispatch_modes, in_plain_autograd, may_exchange_memory, stream_of, trace_here, unsafe_view

# torch's own, taken before anything is patched
_Parameter = torch.nn.Parameter
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled, _inference_mode = torch.is_grad_enabled, torch.is_inference_mode_enabled
_detach, _strided = Tensor.detach, torch.strided

# Bytes of an activation from which its copy is found again: below, that takes longer than a cast. Measured in training steps.
# Not numel(), an op in a trace.
LEAST = 2**15
# After so many activations of one origin whose copies nobody used again, the next ones are cast, but for one in _LOOK_AGAIN. Of so many
# weights or origins something is known at a time.
_SEEN_ENOUGH, _LOOK_AGAIN, _MOST = 32, 31, 2**16

# By id(): weights that their last call used once, with the number of the call in which a wrapper last cast them without asking here. It
# asks at their second use in one call.
used_once: dict[int, int] = {}
_used_again: set[int] = set()  # and those that it used twice or more, without a write between
_in_vain: dict[tuple[int, type], int] = {}  # by the bytes of an activation and the kind of node that made it: copies since the last use
_LEARNT: tuple[Any, ...] = (used_once, _used_again, _in_vain)
_writes = object()  # another one after each step of an optimizer, and after each write that no tensor counts and hmp sees


def wrote() -> None:
    """Have no copy of any thread used again: weights were written in a way that they do not count."""
    global _writes
    _writes = object()  # a number that two threads count up at once may stay the same


def clear_cache() -> None:
    """Forget all low-precision copies, and which weights are used again: to be called after a write that PyTorch does not count.

    Copies live only inside the outermost `casts()` block, or the call of a model. Inside one, hmp does not notice a write to a trainable
    weight through numpy, a raw address, or an alias such as `weight.data.add_(1)`.

    Example:
        >>> hmp.memory.clear_cache()
    """
    wrote()
    for learnt in _LEARNT:
        learnt.clear()
    found: Any = state.outermost.get()
    if found is not None and found.thread == get_ident():
        found.copies = None


class _Copy:
    """A copy of a tensor in another dtype, and the state of the tensor that it was made of.

    It is made before the cast: the next use then sees a write by another thread between the two.

    Args:
        tensor: The tensor that is cast.
        source: A weak reference to it. None: the copy keeps the tensor and its memory, so that no other one gets their addresses.
    """

    __slots__ = ("_address", "_identity", "_source", "_stream", "_version", "_writes", "cast", "kept", "uses")
    cast: Any  # a tensor; of an activation a weak reference to one

    def __init__(self, tensor: Tensor, source: Callable[[], Tensor | None] | None = None) -> None:
        self._source = source
        self.kept = (tensor, _detach(tensor)) if source is None else None
        self._version, self._identity = tensor._version, tensor._cdata
        self._address = None if tensor.device.type == "xla" else tensor.data_ptr()  # XLA has no addresses
        self._writes, self._stream = _writes, stream_of(tensor)
        self.uses = 1

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if the copy has the values of `tensor`."""
        return (
            (self._source is None or self._source() is tensor)
            and self._identity == tensor._cdata  # torch.utils.swap_tensors exchanges it
            and self._version == tensor._version
            and (self._address is None or self._address == tensor.data_ptr())
            and self._writes is _writes
            and (self._stream is None or self._stream == stream_of(tensor))
        )


class Copies:
    """The copies of one call: of weights by id, dtype and mode, and of activations by id, which a graph holds."""

    __slots__ = ("activations", "cast_once", "saved", "weights")

    def __init__(self) -> None:
        self.weights: dict[tuple[int, torch.dtype, int], _Copy] = {}
        self.activations: dict[tuple[int, torch.dtype], _Copy] = {}
        self.cast_once: dict[int, tuple[int, object]] = {}  # weights that were: their version, and `_writes` then
        self.saved = 0  # casts that a copy saved

    def end(self) -> None:
        """Learn from the call which weights are used again."""
        for learnt in _LEARNT:  # also of weights and origins that are gone
            if len(learnt) > _MOST:
                learnt.clear()
        used_once.update(dict.fromkeys(self.cast_once, 0))
        for (number, _, _), copy in self.weights.items():
            (_used_again.add if copy.uses > 1 else _used_again.discard)(number)
            used_once.pop(number, None)


def _here() -> Copies | None:
    """Return the copies of the call that this thread is in; None where each use is a cast of its own."""
    found = state.outermost.get()
    if found is None or found.thread != get_ident() or not may_exchange_memory() or not in_plain_autograd():
        return None
    if dispatch_modes() and torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # tools that watch several ranks see the same ops on each: what is learnt of weights differs between processes
    if found.copies is None:
        found.copies = Copies()
    return found.copies  # type: ignore[no-any-return]


def saved_here() -> int:
    """Return how many casts a copy saved in the call that this thread is in."""
    found = state.outermost.get()
    return 0 if found is None or found.copies is None else found.copies.saved


def shared_cast(tensor: Tensor, dtype: torch.dtype, *, by_step: bool = False) -> Tensor:
    """Return `tensor` in `dtype`: a copy that was made before, where it still has its values, else a new cast.

    For an op whose result never shares memory with it. `by_step`: the op uses it many times, and its gradients are summed in float32.
    """
    # A trace must contain the cast, not its result: torch.jit compares the lines of a trace with those of another.
    if tensor.dtype is dtype or _compiling() or trace_here() is not None or (dtype is torch.float32 and has_float32_gradient(tensor)):
        return cast(tensor, dtype)
    is_weight = type(tensor) is _Parameter and tensor.is_leaf  # detach_() cuts others from their graph, and counts no write
    if tensor.layout is not _strided or not tensor.requires_grad or tensor.is_inference() or not (is_weight or type(tensor) is Tensor):
        return cast(tensor, dtype)
    trains = _grad_enabled()
    if not (is_weight or by_step):
        # in a transform a tensor of symbolic sizes has no `nbytes`
        if not trains or tensor.is_nested or not in_plain_autograd() or tensor.nbytes < LEAST:
            return cast(tensor, dtype)
        origin = tensor.nbytes, type(tensor.grad_fn)
        in_vain = _in_vain[origin] = _in_vain.get(origin, 0) + 1
        if in_vain > _SEEN_ENOUGH and in_vain % _LOOK_AGAIN > 1:  # the second look may be the use that the first waits for
            return TO[dtype](tensor)
    copies = _here()
    if copies is not None and not (is_weight or by_step):
        return _of_activation(copies, tensor, dtype)
    found = _of_weight(copies, tensor, dtype, trains) if copies is not None and is_weight else None
    if found is not None:
        return found.cast  # type: ignore[no-any-return]
    if by_step and trains and can_make_nodes():
        return _node_of(tensor, cast(_detach(tensor), dtype))
    return cast(tensor, dtype)


def shared_weight(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a cast of `tensor`, for an op whose result may share memory with all but its weights."""
    return (shared_cast if type(tensor) is _Parameter else cast)(tensor, dtype)


def widened(low: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `low` in `dtype`, float32, for an op that computes there on rounded inputs. All uses of a weight's copy share one memory."""
    if _compiling() or not hasattr(low, "hmp_wide"):
        return cast(low, dtype)
    if low.hmp_wide is None:
        low.hmp_wide = cast(_detach(low), dtype)
    return _node_of(low, low.hmp_wide) if _grad_enabled() and low.requires_grad else low.hmp_wide


def found_for(weights: Iterable[Tensor | None], dtype: torch.dtype) -> list[Tensor | None] | None:
    """Return the copies that are there for all the weights of a call; None where one has none.

    Where the call is, is asked once for all of them: a cell has four, and its op takes as long as a few casts.
    """
    copies = None if _compiling() else _here()
    if copies is None:
        return None
    used: list[_Copy | None] = []
    for weight in weights:
        found = copies.weights.get(_key(weight, dtype)) if type(weight) is _Parameter and weight.requires_grad else None
        if weight is not None and (found is None or not found.is_of(weight)):  # None: a cell without biases
            return None
        used.append(found)
    for each in used:  # none is used where another one is missing
        if each is not None:
            each.uses += 1
    return [None if each is None else each.cast for each in used]


def _key(weight: Tensor, dtype: torch.dtype) -> tuple[int, torch.dtype, int]:
    return id(weight), dtype, 2 * _inference_mode() + _grad_enabled()


def _of_weight(copies: Copies, weight: Tensor, dtype: torch.dtype, trains: bool) -> _Copy | None:
    """Return the copy of a weight; None where this is its first use and the calls before used it once."""
    number, key = id(weight), _key(weight, dtype)
    found = copies.weights.get(key)
    if found is not None and found.is_of(weight):
        found.uses += 1
        copies.saved += 1
        return found
    if found is not None:  # it was written since
        del copies.weights[key]
        if found.uses == 1:
            _used_again.discard(number)
    written, used = (weight._version, _writes), used_once.pop(number, 0) == state.outermost_number
    if not used and number not in _used_again and copies.cast_once.get(number) != written:
        copies.cast_once[number] = written
        return None
    found = _Copy(weight)
    made = cast(_detach(weight), dtype)
    found.cast = _node_of(weight, made) if trains else made
    found.cast.hmp_wide = None
    copies.weights[key] = found
    found.uses += copies.cast_once.pop(number, None) is not None or used
    _used_again.add(number)
    return found


def _of_activation(copies: Copies, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    key = id(tensor), dtype
    found = copies.activations.get(key)
    made = found.cast() if found is not None and found.is_of(tensor) else None
    if made is None or made._version:
        found = _Copy(tensor, WeakTensor(tensor))
        made = cast(tensor, dtype)
        found.cast = WeakTensor(made)
        copies.activations[key] = found
        return made
    copies.saved += 1
    _in_vain[tensor.nbytes, type(tensor.grad_fn)] = 0
    return _node_of(tensor, _detach(made))


# --- several uses of one copy, whose gradients are summed in the dtype of what was cast (R21) -------------------------------


def can_make_nodes() -> bool:
    """Return True if a node may be made here: outside of traces, transforms and others' dispatch modes."""
    return not _compiling() and may_exchange_memory() and in_plain_autograd()


def _node_of(source: Tensor, copy: Tensor) -> Tensor:
    """Return `copy`, a cast of `source`, as a node of the graph for any number of uses, whose gradients flow to `source`.

    The node is that of a view of `source`, whose memory is then exchanged for the copy's: it was made for the dtype of `source`, so
    autograd casts the gradient of each use to that dtype before it sums.
    """
    node = unsafe_view(source, source.shape)  # unlike a view that torch knows as one, it has a version counter of its own
    if not hasattr(source, "hmp_wide"):  # the gradient of such a copy is cast once more on its way to the weight
        get_gradient_edge(node).node.register_hook(_as_given)
    node.data = copy
    return node


def _as_given(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return a node's gradient as it came in: the node itself gives a view of it, made under no_grad, which may not be written in place."""
    return grad_outputs
