"""Packs what one op saves for backward, by torch's hooks for saved tensors around its call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from ...errors import HmpError
from .. import locks
from ..casting import each_tensor
from ..torch_private import (
    DISABLE_HOOKS,
    are_saved_tensors_hooks_allowed,
    can_be_disabled,
    dispatch_modes,
    function_modes,
    has_storage,
    in_plain_autograd,
    memory_of,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks,
    storage_of,
    trace_here,
    without_torch_function,
)
from .copies import is_cast_copy, is_of_weight, weight_of
from .formats import LEAST, Tensor
from .packable import NOISE_INSIDE, Packing, is_noise, is_statistic, packing_of, why_not
from .saved_tensors import CastAgain, SavedExactly, SavedPacked, layout_of, pack_saved, row_of, tell_kept

Op = Callable[..., Any]
Result = TypeVar("Result")
Saved = SavedExactly | SavedPacked | CastAgain

# torch's own, taken before anything is patched
_grad_enabled = torch.is_grad_enabled
_detach, _is_inference, _numel = Tensor.detach, Tensor.is_inference, Tensor.numel

# What has fewer elements than its op's largest input by this factor is its statistics: a mean, a logsumexp. They are kept as they are.
_OF_STATISTICS = 16


def _unseen(call: Callable[..., Result], *args: Any) -> Result:
    """Return `call(*args)`, of which no torch function mode sees a call."""
    if not function_modes():
        return call(*args)
    with without_torch_function():
        return call(*args)


class _PackHook:
    """The pack hook for one call."""

    __slots__ = ("_least", "_op", "_packing", "args")

    def __init__(self, op: str, packing: Packing, args: tuple[Any, ...]) -> None:
        self._op, self._packing, self.args = op, packing, args
        self._least = 0

    def keep(self, tensor: Tensor) -> Saved:
        """Return what the graph holds for the tensor."""
        return _unseen(self._kept, tensor)

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
    return _unseen(kept.tensor)


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
            f"a saved list needs a torch that says whose saved-tensor hooks are active (2.9 does), got {torch.__version__}; leave out the "
            "saved list, or upgrade torch"
        )


def _refusal(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why nothing can be packed here; "" where it can."""
    assert saved_tensors_hooks is not None  # see check_torch()
    hooks = saved_tensors_hooks(True)
    if hooks is not None and _innermost() is None:
        return "saved-tensor hooks are active (a checkpoint, save_on_cpu or the program's own)"
    if not are_saved_tensors_hooks_allowed():
        return "hooks for saved tensors are disabled"
    if dispatch_modes() or not in_plain_autograd():
        return "a dispatch mode, torch.func, forward-mode differentiation or torch.jit.trace"
    return why_not(op, args, kwargs)


def keeping(op: Op, name: str, recipe: str, count: Callable[[str, str], None], in_graph: bool) -> Op:
    """Return a function that calls `op` and packs what it saves for backward. `count` gets the op and the reason if it cannot.

    `in_graph` says that `op` adds the call to the graph of a compiler, which decides itself what it keeps.
    """
    packing = packing_of(name, recipe)

    def in_compiled_code(*args: Any, **kwargs: Any) -> Any:
        if _grad_enabled():
            count(name, "torch.compile")
        return op(*args, **kwargs)

    def kept(*args: Any, **kwargs: Any) -> Any:
        # not asked of a trace, which would note the question
        small = trace_here() is None and not _any_large(args) and not (kwargs and _any_large(kwargs.values()))
        if small or not _grad_enabled():
            return op(*args, **kwargs)
        refusal = _refusal(name, args, kwargs)
        if refusal:
            count(name, refusal)
            return op(*args, **kwargs)
        hook = _PackHook(name, packing, (*args, *kwargs.values()) if kwargs else args)
        try:  # an interrupt may come after any call
            push_saved_tensors_hooks(hook.keep, _tensor_of)
            return op(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
            hook.args = ()  # the graph holds the hook

    return in_compiled_code if in_graph else kept


class _Counting:
    """The pack hook of all that count in one thread."""

    def __init__(self, keep: Callable[[Tensor], None]) -> None:
        self.told = [keep]

    def pack(self, tensor: Tensor) -> SavedExactly:
        """Report a tensor that is saved. Where hooks are, torch itself would not notice that it is written before backward."""
        with without_torch_function():
            for keep in self.told:
                keep(tensor)
            return SavedExactly(tensor, "an op")


def _innermost() -> _Counting | None:
    """Return what counts in this thread; None if other hooks are inside of it, or torch does not say whose are active."""
    hooks = None if saved_tensors_hooks is None else saved_tensors_hooks(True)
    found = None if hooks is None else getattr(hooks[0], "__self__", None)
    return found if isinstance(found, _Counting) else None


def can_count() -> bool:
    """Return True if counting would take the place of no hook in this thread, and would stop nothing that refuses hooks."""
    if saved_tensors_hooks is None or not can_be_disabled or not are_saved_tensors_hooks_allowed() or not in_plain_autograd():
        return False
    return saved_tensors_hooks(True) is None or _innermost() is not None


@contextlib.contextmanager
def counting(keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Make a context in which `keep` gets the tensors that this thread saves for backward, but for those that are to be packed."""
    found = _innermost()
    if found is not None:  # torch calls the innermost hook alone
        found.told.append(keep)
        try:
            yield
        finally:
            found.told.remove(keep)
        return
    counter = _Counting(keep)
    with _for_transforms:
        push_saved_tensors_hooks(counter.pack, _tensor_of)
        try:
            yield
        finally:
            pop_saved_tensors_hooks()


class _ForTransforms:
    """While entered, torch.func.grad() and the like disable hooks that count, where they refuse to run inside of others."""

    def __init__(self) -> None:
        self._lock = locks.RLock()
        self._entered = 0
        self._original: Callable[..., None] = getattr(*DISABLE_HOOKS)

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1 and can_be_disabled:
                self._original = getattr(*DISABLE_HOOKS)
                setattr(*DISABLE_HOOKS, self._disable)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and getattr(*DISABLE_HOOKS) == self._disable:
                setattr(*DISABLE_HOOKS, self._original)

    def _disable(self, message: str, fail_if_non_empty: bool = True) -> None:
        self._original(message, fail_if_non_empty and _innermost() is None)


_for_transforms = _ForTransforms()
