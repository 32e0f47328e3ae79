"""No list applies to user Python that autograd calls, such as hooks.

A checkpoint's recomputation runs under the policy of its forward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from .. import torch_private
from ..active import autocast, state
from ..active.regions import without_casts
from ..active.state import UnderCapturedState, call_without_casts
from ..patching import patches
from ..patching.patched_op import PatchedMethod
from . import imports


def install() -> None:
    """Until patches.restore().

    No list applies in hooks and in autograd.Function.backward, and nothing is cast in the pack hooks of saved tensors, which autograd calls
    inside an op.
    """

    def enter(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def push(self: Any) -> None:
            original(types.SimpleNamespace(pack_hook=autocast.in_outer(without_casts(self.pack_hook)), unpack_hook=self.unpack_hook))

        return push

    def of_users_function(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda func, *args, **kwargs: call_without_casts(original, UnderCapturedState(func), *args, **kwargs)

    def transform(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            # made anew at each call: the user's function runs under what is active there
            return functools.wraps(func)(
                lambda *inputs, **named: call_without_casts(original(UnderCapturedState(func), *args, **kwargs), *inputs, **named)
            )

        return make

    def continuing(original: Callable[..., Any]) -> Callable[..., Any]:
        """Attach a callback that runs under the state active now, in whatever thread: DDP's communication hooks run as in backward."""

        @functools.wraps(original)
        def attach(self: Any, callback: Callable[..., Any]) -> Any:
            return original(self, functools.partial(state.call_under, state.current_state(), callback))

        return attach

    for name in ("then", "add_done_callback"):
        patches.rebind(torch_private.Future, name, continuing(vars(torch_private.Future)[name]))
    patches.wrap(*torch_private.RUN_BACKWARD, lambda run_backward: functools.partial(state.call_in_backward, run_backward))
    patches.rebind(BackwardCFunction, "__init__", _marking(BackwardCFunction.__init__))
    own: Any = torch.Tensor.register_hook
    patches.rebind(torch.Tensor, "register_hook", PatchedMethod(own, _marking_hooked(own), "torch", "Tensor.register_hook"))
    patches.wrap_by_name("torch.autograd.graph", "saved_tensors_hooks.__enter__", enter)
    # casts are off in these themselves: they join their results by ops that may be listed
    for name in ("vjp", "jvp", "vhp", "hvp", "jacobian", "hessian"):
        patches.wrap_by_name("torch.autograd.functional", name, of_users_function)
    for name in ("jacrev", "jacfwd"):
        patches.wrap_by_name("torch.func", name, transform)
    _install_checkpoint()


def _marking(init: Callable[..., None]) -> Callable[..., None]:
    # torch's C++ code makes the node before it calls the function's forward
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        state.mark(self)

    return __init__


def _marking_hooked(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        handle = register(self, hook)  # which refuses a tensor without a gradient
        state.mark(self.grad_fn)
        return handle

    return register_hook


# --- recomputation --------------------------------------------------------------------------------------------------------------


def _install_checkpoint() -> None:
    """Until patches.restore(): a recomputation runs under the policy of its forward, in whatever thread backward runs."""

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ctx, run_function, *args: original(ctx, UnderCapturedState(run_function), *args)

    def generator(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda fn, *args, **kwargs: original(UnderCapturedState(fn), *args, **kwargs)

    def unasked(original: Callable[..., Any]) -> Callable[..., Any]:
        # it asks whether torch.autocast is enabled for CUDA, to enable it again in backward
        return lambda ctx, run_function, *args: call_without_casts(forward(original), ctx, UnderCapturedState(run_function), *args)

    patches.wrap_by_name("torch.utils.checkpoint", "CheckpointFunction.forward", forward)
    xlas = "torch_xla.utils.checkpoint"  # torch's own knows no XLA
    imports.after({xlas: functools.partial(patches.wrap_by_name, xlas, "CheckpointFunction.forward", unasked)})
    patches.wrap(*torch_private.checkpoint_generator(), generator)
