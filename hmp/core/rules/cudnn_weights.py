"""Weights of a recurrent layer in one buffer, as cuDNN takes them.

Each cast weight is a tensor of its own. cuDNN would copy them into one buffer at each call, and warn to call flatten_parameters(),
which cannot help here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..casting import Tensor
from ..torch_private import data_of, dispatch_modes, flatten_cudnn_weights, in_plain_autograd, storage_of

Op = Callable[..., Any]

# torch's own, taken before anything is patched
_compiling = torch.compiler.is_dynamo_compiling
_no_grad = torch.no_grad
_alias = data_of.__get__  # with a version of its own: others may have saved the weight for backward


# cuDNN's number of a kind of recurrent layer, and how many gates it has.
_KINDS = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 4), "gru": (3, 3)}


def with_one_buffer(op: Op, name: str) -> Op:
    """Return `op`, a recurrent layer's called `name`, given its weights in one buffer where cuDNN will compute it; another op itself."""
    kind = _KINDS.get(name)
    if kind is None or flatten_cudnn_weights is None:
        return op

    def with_weights_together(*args: Any, **kwargs: Any) -> Any:
        at = 3 if len(args) > 3 and isinstance(args[3], (list, tuple)) else 2  # after the sizes of a packed batch
        weights = args[at] if len(args) == 9 and not kwargs else ()
        if not isinstance(weights, (list, tuple)) or not weights or not _are_for_cudnn(weights):
            return op(*args, **kwargs)
        layers, bidirectional = args[at + 2], args[at + 5]
        batch_first = at == 2 and args[8]
        together = _in_one_buffer(list(weights), kind, layers, bidirectional, batch_first)
        return op(*args[:at], together, *args[at + 1 :])

    return with_weights_together


def _are_for_cudnn(weights: Sequence[Any]) -> bool:
    """Return True if these are plain low-precision weights on CUDA, each in memory of its own."""
    first = weights[0]
    if not (isinstance(first, Tensor) and first.is_cuda and first.dtype is not torch.float32):
        return False
    cudnn = torch.backends.cudnn  # is_acceptable() does not know bfloat16, which cuDNN takes
    if _compiling() or dispatch_modes() or not in_plain_autograd() or not (cudnn.enabled and cudnn.is_available()):
        return False
    plain = all(type(each) is Tensor and each.dtype is first.dtype for each in weights)
    return plain and len({storage_of(each)._cdata for each in weights}) == len(weights)


def _in_one_buffer(weights: list[Tensor], kind: tuple[int, int], layers: int, bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:
    """Return the same weights as views of a new buffer; gradients flow to them."""
    assert flatten_cudnn_weights is not None
    of_a_direction = len(weights) // (layers * (2 if bidirectional else 1))
    mode, gates = kind
    hidden, inner = weights[0].shape[0] // gates, weights[1].shape[1]
    sizes = weights[0].shape[1], mode, hidden, 0 if inner == hidden else inner
    flatten = flatten_cudnn_weights

    def flat(*given: Tensor) -> tuple[Tensor, ...]:
        with _no_grad():
            views = [_alias(each) for each in given]
            flatten(views, of_a_direction, *sizes, layers, batch_first, bidirectional)
        return tuple(views)

    if torch.is_grad_enabled() and any(each.requires_grad for each in weights):
        found: tuple[Tensor, ...] = _Same.apply(flat, *weights)  # type: ignore[no-untyped-call]
        return found
    return flat(*weights)


class _Same(torch.autograd.Function):
    """`function(*tensors)`, which gives the same values in other memory."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients
