"""Code that would go wrong under casts: modules of torch with checks of dtypes, fast paths or threads, and libraries' autocast kernels."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import casting, torch_private
from ..active import autocast, state
from ..active.state import UnderCapturedState
from ..compiler_stance import untraced
from ..patching import patches
from ..torch_private import OpOverload, OpOverloadPacket


def install() -> None:
    """Patch those modules of torch until patches.restore()."""
    patches.wrap_by_name("torch.nn.parallel.parallel_apply", "parallel_apply", _replicas)
    patches.wrap_by_name("torch.backends.mha", "get_fastpath_enabled", _no_fast_path)
    patches.wrap_by_name("torch.nn.modules.rnn", "RNNBase.check_input", _check_shape_only)
    _install_library_ops()


def _replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `parallel_apply` of nn.DataParallel's whose threads run under the caller's state."""

    def parallel_apply(modules: Any, *args: Any, **kwargs: Any) -> Any:
        return original([UnderCapturedState(module) for module in modules], *args, **kwargs)

    return parallel_apply


def _no_fast_path(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return a `get_fastpath_enabled` that is False where casts are on: attention then runs op by op in eval, too."""

    def get_fastpath_enabled() -> bool:
        return not state.casts_enabled() and original()

    return get_fastpath_enabled


def _check_shape_only(original: Callable[..., None]) -> Callable[..., None]:
    """Return an RNNBase.check_input that accepts an input of another dtype than the weights' where casts are on: the call casts it."""

    def check_input(self: Any, input: torch.Tensor, batch_sizes: Any) -> None:
        weight = self._flat_weights[0]
        if input.dtype is not weight.dtype and state.casts_enabled():
            # the original reads only dtype and shape
            input = torch.empty(input.shape, dtype=weight.dtype, device="meta")
        original(self, input, batch_sizes)

    return check_input


# --- a library's op with an autocast kernel of its own gets what that kernel asks for, as under torch.autocast --------------------
#
# Such kernels (torchvision's nms and roi_align, what `torch.library.register_autocast` makes) cast the op's inputs, and only an enabled
# torch.autocast reaches them. So it is enabled for the one call of such an op. Ops without such a kernel stay as they are, as torch's do.

_changed: weakref.WeakSet[Any] = weakref.WeakSet()


def _install_library_ops() -> None:
    """Enable torch.autocast around calls of such ops, those that are made later too, until patches.restore()."""
    patches.on_restore(_restore)
    for op in torch_private.library_ops():
        _change(op)
    for cls in (OpOverload, OpOverloadPacket):
        patches.wrap(cls, "__init__", _made)
    patches.wrap(torch.library.Library, "impl", _registered)


def has_autocast_kernel(op: Any) -> bool:
    """Return True if `op` is the packet or overload of a library's op with an autocast kernel of its own."""
    is_op = isinstance(op, (OpOverload, OpOverloadPacket))
    return is_op and torch_private.is_of_library(torch_private.name_of(op)) and torch_private.has_autocast_kernel(op)


def with_autocast(op: Any, call: Callable[..., Any], low: torch.dtype) -> Callable[..., Any]:
    """Return what runs in place of such an `op`: `call`, in a torch.autocast context where its kernel is reached through one."""

    def called(*args: Any, **kwargs: Any) -> Any:
        tensor = next(casting.each_tensor((args, kwargs)), None)
        device = "" if tensor is None else tensor.device.type
        if tensor is None or autocast.is_enabled(device) or not torch_private.has_autocast_kernel(op, device):
            return call(*args, **kwargs)
        return autocast.call_enabled(device, low, False, call, *args, **kwargs)

    return called


def _casting(op: Any, builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Return what replaces the builtin of such an op."""

    # Dynamo would compile a kernel that is written in Python, and be confused by the change of autocast
    @untraced
    def plain(*args: Any, **kwargs: Any) -> Any:
        return builtin(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        policy = None if autocast.is_in_op() else state.current_policy()
        return builtin(*args, **kwargs) if policy is None else with_autocast(op, plain, policy.dtype)(*args, **kwargs)

    return call


def _change(op: Any) -> None:
    if op in _changed or not has_autocast_kernel(op):
        return
    _changed.add(op)
    torch_private.replace_builtin(op, functools.partial(_casting, op))


def _restore() -> None:
    while _changed:
        torch_private.restore_builtin(_changed.pop())


def _made(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _change(self)

    return __init__


def _registered(impl: Callable[..., Any]) -> Callable[..., Any]:
    def impl_and_change(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        result = impl(self, op_name, fn, dispatch_key, **kwargs)
        if (dispatch_key or self.dispatch_key).startswith("Autocast"):
            for op in torch_private.library_ops():
                _change(op)
        return result

    return impl_and_change
