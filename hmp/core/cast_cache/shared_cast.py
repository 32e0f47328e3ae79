"""Several uses of one cast, which share its memory, and whose gradients are summed in the dtype of what was cast (R21)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from threading import get_ident

import torch
from torch.autograd.graph import get_gradient_edge

from ..casting import Tensor
from ..torch_private import copy_on_write as _copy_on_write
from ..torch_private import in_plain_autograd, may_exchange_memory
from ..torch_private import unsafe_view as _unsafe_view
from . import mark_proof

# torch's own, taken before anything is patched
_compiling = torch.compiler.is_dynamo_compiling
_expand_as = Tensor.expand_as

# Bytes of an activation from which, where no gradient is needed, its copy is quicker found again than made again: below, marking the memory
# takes longer than the casts that are saved. Measured in inference: from 32 KiB on it took 2 to 4 % of small models' time, at 260 KiB to
# 1 MiB nothing. Not numel(), an op in a trace.
WORTH_KEEPING = 2**20
# The same where one is needed, which hmp.set_sharing() changes: there a use of an activation costs a node of the graph. Measured in
# training steps: at 128 KiB sharing takes longer than casting, at 260 and 384 KiB it does not. It saves memory at every size, so the
# default is small.
DEFAULT_LEAST = 2**15
least = DEFAULT_LEAST
# The same of weights, whose uses have one node together.
DEFAULT_LEAST_WEIGHT = 0
least_weight = DEFAULT_LEAST_WEIGHT

# Casts that a copy saved, by thread: no count is lost between threads, and a recording asks what the call that it sees was saved.
_hits: dict[int, int] = {}


def count_hit() -> None:
    """Count a cast that a copy saved, for the calling thread."""
    thread = get_ident()
    _hits[thread] = _hits.get(thread, 0) + 1


def hits_here() -> int:
    """Return how many casts a copy saved in the calling thread since hmp patched torch."""
    return _hits.get(get_ident(), 0)


def hits() -> int:
    """Return how many casts a copy saved, in all threads, since hmp patched torch."""
    return sum(list(_hits.values()))  # the list is made at once, while other threads count on


def forget_hits() -> None:
    """Set the counts to 0."""
    _hits.clear()


def can_make_nodes() -> bool:
    """Return True if node_of() may be called here: outside of traces, transforms and others' dispatch modes."""
    return not _compiling() and may_exchange_memory() and in_plain_autograd()


def node_of(source: Tensor, copy: Tensor) -> Tensor:
    """Return `copy`, a cast of `source` made before, as a new node of the graph, for any number of uses.

    Their gradients flow to `source`, cast to the dtype of `source` and then summed.

    The node is that of a clone of `source` whose memory is then exchanged for the copy's. Autograd itself casts each use's gradient,
    because the node was made for the dtype of `source`; a Python autograd.Function that does so takes twice as long. No memory is copied:
    the clone is one by copy-on-write, of a view of `source` that was given other memory, so that no mark is set on that of `source`.
    """
    zero = _zero_of(source.device, source.dtype)
    # unlike a view that torch knows as one, neither shares a version counter with `source`
    if zero is None or _copy_on_write is None:
        node = _unsafe_view(source, source.shape)
        get_gradient_edge(node).node.register_hook(_as_given)
    else:
        view = _expand_as(source, source)
        view.data = _expand_as(zero, source)
        node = _copy_on_write.lazy_clone(view)
    node.data = copy
    return node


@functools.cache
def _zero_of(device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return a zero whose memory clones share by copy-on-write, none of which is ever written; None where the device has no such memory."""
    if _copy_on_write is None or (device.type != "cpu" and mark_proof.refusal(device)):
        return None
    zero: Tensor = torch.ops.aten.zeros.default([], device=device, dtype=dtype)
    _copy_on_write.lazy_clone(zero)  # from now on threads may clone it at the same time
    return zero


def _as_given(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return a node's gradient as it came in: the node itself gives a view of it, made under no_grad, which may not be written in place."""
    return grad_outputs
