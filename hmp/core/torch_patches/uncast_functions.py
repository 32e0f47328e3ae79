"""R15, R8: torch's code that runs around a model, or below an op, is never cast.

It is gradient scaling and clipping, initialisers, tests, printing, data loading, optimizers, and `__torch_dispatch__`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.utils.prune
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import copies, torch_private
from ..active import UnderCapturedState, autocast, call_without_casts, state, without_casts
from ..patching import patches, subclasses
from .module_construction import UntilReturn

# module → its functions that a model's call may call; "Class.method" for methods
_IN_CALLS: dict[str, tuple[str, ...]] = {
    "torch.amp.grad_scaler": ("GradScaler.scale", "GradScaler.unscale_", "GradScaler.step", "GradScaler.update"),
    "torch.nn.utils.clip_grad": ("get_total_norm", "clip_grads_with_norm_"),  # clip_grad_norm_ calls these, or AROUND_A_MODEL's
    "torch.optim.swa_utils": ("AveragedModel.update_parameters",),
    "torch.utils.data.dataloader": ("DataLoader.__iter__",),
}
# and those that none does
_AROUND_CALLS: dict[str, tuple[str, ...]] = {
    # these compute a weight once, and store it
    "torch.nn.utils.spectral_norm": ("remove_spectral_norm", "spectral_norm"),
    "torch.nn.utils.weight_norm": ("remove_weight_norm", "weight_norm"),
    "torch.nn.utils.parametrizations": ("orthogonal", "spectral_norm", "weight_norm"),
    "torch.nn.utils.parametrize": ("register_parametrization", "remove_parametrizations"),
    "torch.autograd.gradcheck": ("gradcheck", "gradgradcheck"),
    "torch.testing": ("assert_close", "assert_allclose", "make_tensor"),
}


def install() -> None:
    """Make these functions run with casts off, until patches.restore()."""
    _wrap(_IN_CALLS)
    for place in torch_private.AROUND_A_MODEL:
        patches.wrap(*place, without_casts)
    for scheduler in [*vars(torch.optim.lr_scheduler).values()]:
        if inspect.isclass(scheduler) and "step" in vars(scheduler):
            patches.wrap(scheduler, "step", without_casts)
    _install_optimizers()
    _install_captured_graphs()
    _install_dispatch_modes()


def install_around_calls() -> None:
    """Do the same with those that only a policy outside of the calls of models would cast."""
    _wrap(_AROUND_CALLS)
    for module in (torch.nn.init, torch.nn.utils.prune, torch.nn.utils.fusion):
        for name, function in [*vars(module).items()]:
            if not name.startswith("_") and str(getattr(function, "__module__", "")).startswith("torch.nn."):
                patches.wrap(module, name, without_casts)


def _wrap(places: Mapping[str, Iterable[str]]) -> None:
    for module, names in places.items():
        for name in names:
            patches.wrap_by_name(module, name, without_casts)


# --- optimizers, whose steps' closures run under the state outside the step -----------------------------------------------------


def _install_optimizers() -> None:
    """Until patches.restore(): steps of every optimizer class run with casts off, of a class without instances from its first one on."""
    for cls in (torch.optim.Optimizer, *subclasses(torch.optim.Optimizer)):
        _patch_step(cls)

    def patch_step_function(original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(self: Any) -> None:
            original(self)
            for cls in type(self).__mro__:
                _patch_step(cls)

        return patched

    patches.wrap(*torch_private.STEP_HOOKER, patch_step_function)
    # an optimizer may hold the step that its class had before: learning rate schedulers have it do so
    patches.on_restore(register_optimizer_step_pre_hook(_off_in_step).remove)
    patches.on_restore(register_optimizer_step_post_hook(lambda *_: copies.wrote()).remove)


def _patch_step(cls: type) -> None:
    step = vars(cls).get("step")
    # torch hooks a class's step when its first instance is made: only that one is what users call
    if getattr(step, "hooked", False):
        patches.wrap(cls, "step", _step)


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_closures(args, kwargs)
        try:
            return call_without_casts(original, self, *args, **kwargs)
        finally:
            copies.wrote()  # a fused step is counted by no tensor's version

    return step


def _off_in_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn casts off until the step returns, where they are on: a hook of an optimizer that was called past the class."""
    if not state.casts_enabled():
        return None
    given, named = _with_closures(args[1:], kwargs)
    UntilReturn(sys._getframe(1)).begin()
    return (args[0], *given), named


def _with_closures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step. A closure among them runs the forward pass, under the state outside the step."""
    given = tuple(_Closure(each) if callable(each) else each for each in args)
    return given, {name: _Closure(each) if callable(each) else each for name, each in kwargs.items()}


class _Closure(UnderCapturedState):
    """A closure of a step: its forward finds no copy of a weight from before the step's writes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the closure under the state outside the step."""
        copies.wrote()
        return super().__call__(*args, **kwargs)


# --- captured graphs, whose replays write and read by address (R18) -------------------------------------------------------------

# The classes of captured graphs that torch may have.
# on Gaudi: a step is captured by torch.hpu.HPUGraph.capture_begin(), which is there before convert(), and a replay writes by address.
_GRAPHS = (("cuda", "CUDAGraph"), ("xpu", "XPUGraph"), ("hpu", "HPUGraph"), ("accelerator", "Graph"))


def _install_captured_graphs() -> None:
    """Until patches.restore(): no copy of a weight from outside of a capture is used in it, and none from inside after it."""
    has_accelerator = torch.accelerator.current_accelerator() is not None
    for module, name in _GRAPHS:
        graph: Any = getattr(getattr(torch, module, None), name, None)
        if "capture_begin" in vars(graph or object) and (has_accelerator or not graph.__module__.startswith("torch.")):
            for method in ("capture_begin", "capture_end"):
                patches.rebind(graph, method, _after_a_write(getattr(graph, method)))


def _after_a_write(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        copies.wrote()
        return own(self, *args, **kwargs)

    return capture


# --- `__torch_dispatch__`, which torch calls below an op (R8) -------------------------------------------------------------------


def _install_dispatch_modes() -> None:
    """Until patches.restore(): the `__torch_dispatch__` of modes (FakeTensorMode for one) and of tensor subclasses runs with casts off."""

    def enter(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def entered(self: Any) -> Any:
            _patch_dispatch(type(self))
            return original(self)

        return entered

    patches.wrap(torch_private.TorchDispatchMode, "__enter__", enter)
    fake_tensor_mode = torch_private.fake_tensor_mode()
    if fake_tensor_mode is not None:
        _patch_dispatch(fake_tensor_mode)  # one may be entered already
    for cls in subclasses(torch.Tensor):
        _patch_dispatch(cls)

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(torch.Tensor, cls).__init_subclass__(**kwargs)
        _patch_dispatch(cls)

    patches.rebind(torch.Tensor, "__init_subclass__", classmethod(init_subclass))


def _patch_dispatch(cls: type) -> None:
    patches.wrap(cls, "__torch_dispatch__", _outside)
    # torch calls a DTensor's dispatcher from C++, which calls its methods
    dispatcher = type(vars(cls).get("_op_dispatcher"))
    for name in vars(dispatcher).keys() - {"__init__"} if "_op_dispatcher" in vars(cls) else ():
        patches.wrap(dispatcher, name, _outside)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    return autocast.in_outer(without_casts(function))
