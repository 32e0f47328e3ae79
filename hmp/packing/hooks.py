"""Packs what one op saves for backward, by torch's hooks for saved tensors around its call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..core.casting import each_tensor
from ..core.saved_tensors import SavedExactly, innermost_counter, tell_kept, unseen
from ..core.torch_private import (
    are_saved_tensors_hooks_allowed,
    dispatch_modes,
    has_storage,
    in_plain_autograd,
    memory_of,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks,
    storage_of,
    trace_here,
)
from ..errors import HmpError
from .copies import is_cast_copy, is_of_weight, weight_of
from .formats import LEAST, Tensor
from .packable import NOISE_INSIDE, Packing, is_noise, is_statistic, packing_of, why_not
from .saved_tensors import CastAgain, SavedPacked, layout_of, pack_saved, row_of

Op = Callable[..., Any]
Saved = SavedExactly | SavedPacked | CastAgain

# torch's own, taken before anything is patched
_grad_enabled = torch.is_grad_enabled
_detach, _is_inference, _numel = Tensor.detach, Tensor.is_inference, Tensor.numel

# What has fewer elements than its op's largest input by this factor is its statistics: a mean, a logsumexp. They are kept as they are.
_OF_STATISTICS = 16


class _PackHook:
    """The pack hook for one call."""

    __slots__ = ("_least", "_op", "_packing", "args")

    def __init__(self, op: str, packing: Packing, args: tuple[Any, ...]) -> None:
        self._op, self._packing, self.args = op, packing, args
        self._least = 0

    def keep(self, tensor: Tensor) -> Saved:
        """Return what the graph holds for the tensor."""
        return unseen(self._kept, tensor)

    def _kept(self, tensor: Tensor) -> Saved:
        if type(tensor) is not Tensor or not _is_plain(tensor) or _is_leafs(tensor):
            return SavedExactly(tensor, self._op)
        if tensor.dtype not in self._packing.form.takes or is_statistic(self._op, tensor, self.args):
            return self._exactly(tensor)
        copied = weight_of(tensor)
        if copied is not None:
            tell_kept(self._op, tensor, 0)
            return CastAgain(copied, layout_of(tensor), self._op)
        if is_of_weight(tensor):
            return SavedExactly(tensor, self._op)
        if self._is_programs(tensor) or (_numel(tensor) < self._smallest() and storage_of(tensor).nbytes() < 2 * tensor.nbytes):
            return self._exactly(tensor)
        packing = NOISE_INSIDE if is_noise(self._op, tensor, self.args) else self._packing
        if packing.form.scaled and not row_of(tensor, packing.by_memory):
            return self._exactly(tensor)
        return pack_saved(tensor, packing, self._op)

    def _exactly(self, tensor: Tensor) -> SavedExactly:
        tell_kept(self._op, tensor, None)
        return SavedExactly(tensor, self._op)

    def _is_programs(self, tensor: Tensor) -> bool:
        """Return True if the op was given the tensor, and nothing computed it with gradients: a batch, a mask, a table."""
        if not tensor.is_leaf or is_cast_copy(tensor):
            return False
        memory = memory_of(storage_of(tensor))
        return any(has_storage(given) and memory_of(storage_of(given)) == memory for given in each_tensor(self.args))

    def _smallest(self) -> int:
        if not self._least:
            sizes = [_numel(a) for a in self.args if isinstance(a, Tensor)]
            self._least = max(LEAST, *(size // _OF_STATISTICS for size in sizes)) if sizes else LEAST
        return self._least


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or _is_inference(tensor) or tensor.is_neg():
        return False  # a negated view's memory has other numbers
    return tensor.device.type != "meta"


def _is_leafs(tensor: Tensor) -> bool:
    """Return True if it is, or is a view of, a parameter or a leaf that needs a gradient: the program holds it."""
    base = tensor if tensor._base is None else tensor._base
    return type(base) is not Tensor or (base.is_leaf and base.requires_grad)


def _tensor_of(kept: Saved) -> Tensor:
    """Return the unpack hook."""
    return unseen(kept.tensor)


def _any_large(values: Iterable[Any]) -> bool:
    """Return True if one of an op's arguments is large enough that what it keeps may be worth packing."""
    for value in values:
        if isinstance(value, Tensor):
            if _numel(value) >= LEAST:
                return True
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
            return True
    return False


def check_torch() -> None:
    """Raise HmpError if torch does not say whose saved-tensor hooks are active: a checkpoint's would be passed over."""
    if saved_tensors_hooks is None:
        raise HmpError(
            f"a saved list needs a torch that says whose saved-tensor hooks are active (2.8 does), got {torch.__version__}; leave out the "
            "saved list, or upgrade torch"
        )


def _refusal(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why nothing can be packed here; "" where it can."""
    assert saved_tensors_hooks is not None  # see check_torch()
    hooks = saved_tensors_hooks(True)
    if hooks is not None and innermost_counter() is None:
        return "saved-tensor hooks are active (a checkpoint, save_on_cpu or the program's own)"
    if not are_saved_tensors_hooks_allowed():
        return "hooks for saved tensors are disabled"
    if dispatch_modes() or not in_plain_autograd():
        return "a dispatch mode, torch.func, forward-mode differentiation or torch.jit.trace"
    return why_not(op, args, kwargs)


def packing_wrapper(op: Op, name: str, recipe: str, count: Callable[[str], None], in_graph: bool) -> Op:
    """Return a function that calls `op` and packs what it saves for backward. `count` gets the reason if it cannot.

    `in_graph` says that `op` adds the call to the graph of a compiler, which decides itself what it keeps.
    """
    packing = packing_of(name, recipe)

    def in_compiled_code(*args: Any, **kwargs: Any) -> Any:
        if _grad_enabled():
            count("torch.compile")
        return op(*args, **kwargs)

    def kept(*args: Any, **kwargs: Any) -> Any:
        # not asked of a trace, which would note the question
        small = trace_here() is None and not _any_large(args) and not (kwargs and _any_large(kwargs.values()))
        if small or not _grad_enabled():
            return op(*args, **kwargs)
        refusal = _refusal(name, args, kwargs)
        if refusal:
            count(refusal)
            return op(*args, **kwargs)
        hook = _PackHook(name, packing, (*args, *kwargs.values()) if kwargs else args)
        try:  # an interrupt may come after any call
            push_saved_tensors_hooks(hook.keep, _tensor_of)
            return op(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
            hook.args = ()  # the graph holds the hook

    return in_compiled_code if in_graph else kept
