"""What is never cast: torch's code around models and below ops, the construction and loading of modules, and their state.

Code around models is gradient scaling and clipping, initialisers, tests, printing, data loading and optimizers; code below ops is
`__torch_dispatch__`. Modules are constructed and loaded without casts, because scripts convert first and build the model later.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.utils.prune
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import casting, copies, torch_private
from ..active import autocast, state
from ..active.regions import without_casts
from ..active.state import EnteredRegion, Off, UnderCapturedState, call_without_casts
from ..patching import patches
from ..patching.names import subclasses
from . import imports

# module → its functions that run without casts, wherever they are called; "Class.method" for methods. Some modules may be imported late.
_ALWAYS: dict[str, tuple[str, ...]] = {
    "torch.amp.grad_scaler": ("GradScaler.scale", "GradScaler.unscale_", "GradScaler.step", "GradScaler.update"),
    "torch.nn.utils.clip_grad": ("get_total_norm", "clip_grads_with_norm_"),  # clip_grad_norm_ calls these, or AROUND_A_MODEL's
    "torch.optim.swa_utils": ("AveragedModel.update_parameters",),
    "torch.utils.data.dataloader": ("DataLoader.__iter__",),
    # these load, save or compute the state of modules
    "torch.nn.modules.module": ("Module.load_state_dict",),  # with assign=True it gives parameters and buffers another dtype on purpose
    "torch.serialization": ("load", "save"),
    "torch.distributed.checkpoint.state_dict_loader": ("load",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("load", "load_file", "load_model", "save", "save_file", "save_model"),
    "accelerate.utils.modeling": ("load_checkpoint_in_model",),
    "accelerate.big_modeling": ("load_checkpoint_and_dispatch",),
    "torch.ao.quantization.observer": (
        "UniformQuantizationObserverBase._calculate_qparams", "MinMaxObserver.forward", "MovingAverageMinMaxObserver.forward",
        "PerChannelMinMaxObserver.forward", "MovingAveragePerChannelMinMaxObserver.forward", "HistogramObserver.forward",
    ),
}  # fmt: skip
# and those that no call of a model calls
_AROUND_CALLS: dict[str, tuple[str, ...]] = {
    # these compute a weight once, and store it
    "torch.nn.utils.spectral_norm": ("remove_spectral_norm", "spectral_norm"),
    "torch.nn.utils.weight_norm": ("remove_weight_norm", "weight_norm"),
    "torch.nn.utils.parametrizations": ("orthogonal", "spectral_norm", "weight_norm"),
    "torch.nn.utils.parametrize": ("register_parametrization", "remove_parametrizations"),
    "torch.autograd.gradcheck": ("gradcheck", "gradgradcheck"),
    "torch.testing": ("assert_close", "assert_allclose", "make_tensor"),
}
# Class methods that construct a model and load or compute its state.
_CONSTRUCTORS = frozenset({"from_pretrained", "from_config", "_from_config", "load_from_checkpoint"})


def install() -> None:
    """Have all of this run with casts off, until patches.restore(), but for what `install_around_calls()` adds."""
    _wrap(_ALWAYS)
    for place in torch_private.AROUND_A_MODEL:
        patches.wrap(*place, without_casts)
    for scheduler in [*vars(torch.optim.lr_scheduler).values()]:
        if inspect.isclass(scheduler) and "step" in vars(scheduler):
            patches.wrap(scheduler, "step", without_casts)
    patches.wrap(torch.nn.Module, "__init__", _late)
    _install_optimizers()
    _install_captured_graphs()
    _install_dispatch_modes()
    _install_assignments()


def install_around_calls() -> None:
    """Do the same with what only a policy outside of the calls of models would cast: initialisers, and modules from their first line on."""
    if patches.rebound(torch.nn.Module, "__init_subclass__"):  # by the last step
        return
    _wrap(_AROUND_CALLS)
    for module in (torch.nn.init, torch.nn.utils.prune, torch.nn.utils.fusion):
        for name, function in [*vars(module).items()]:
            if not name.startswith("_") and str(getattr(function, "__module__", "")).startswith("torch.nn."):
                patches.wrap(module, name, without_casts)
    _install_constructors()


def _wrap(places: Mapping[str, Iterable[str]]) -> None:
    def wrap(module: str, names: Iterable[str]) -> None:
        for name in names:
            patches.wrap_by_name(module, name, without_casts)

    imports.after({module: functools.partial(wrap, module, names) for module, names in places.items()})


# --- the construction of modules ------------------------------------------------------------------------------------------------


def _install_constructors() -> None:
    """Turn casts off in the whole construction of every module, of classes made later too, until patches.restore()."""
    for cls in subclasses(torch.nn.Module):
        _patch_construction(cls)
    own: Any = vars(torch.nn.Module).get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        if own is None:
            super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        else:
            own.__get__(None, cls)(**kwargs)
        if not isinstance(cls, type(torch.jit.ScriptModule)):  # which gives a class another `__init__` right after this
            _patch_construction(cls)

    patches.rebind(torch.nn.Module, "__init_subclass__", classmethod(init_subclass))


class InitWithoutCasts:
    """A class's `__init__`, which runs with casts off. A base's that it calls finds casts off, and is called directly.

    A descriptor, not a wrapper: a frame of hmp's between a subclass's `__init__` and its base's would hide the arguments from code that
    collects them by walking the stack; and `Class.__init__` stays the same function.
    """

    def __init__(self, function: Any) -> None:
        self.function = self.__wrapped__ = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = self.function.__get__(instance, owner)
        is_call = isinstance(instance, torch.nn.Module)  # inspect.signature() of Python 3.14 binds it to the class
        return functools.partial(state.call_without_casts, bound) if is_call and state.casts_enabled() else bound


def _patch_construction(cls: type) -> None:
    own = vars(cls).get("__init__")
    if hasattr(own, "__get__") and not isinstance(own, InitWithoutCasts):
        patches.rebind(cls, "__init__", InitWithoutCasts(own))
    for name in _CONSTRUCTORS & vars(cls).keys():
        if isinstance(vars(cls)[name], (classmethod, staticmethod)):
            patches.wrap(cls, name, without_casts)


def _late(base_init: Callable[..., None]) -> Callable[..., None]:
    """Return an nn.Module.__init__ for an `__init__` of which hmp does not know: that of a mixin, or one given to the class later.

    Where casts are on, it turns them off until that `__init__` returns.
    """

    def init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if state.casts_enabled():
            frame = _constructing_frame(self)
            if frame is not None:
                UntilReturn(frame).begin()
        base_init(self, *args, **kwargs)

    return init


def _constructing_frame(module: torch.nn.Module) -> types.FrameType | None:
    """Return the outermost frame on the stack whose first argument is `module`: the `__init__` that is being run."""
    found = None
    frame: types.FrameType | None = sys._getframe(3)  # past _late's function and the base class's own frame
    while frame is not None:
        names = frame.f_code.co_varnames
        if names and frame.f_locals.get(names[0]) is module:
            found = frame
        frame = frame.f_back
    return found


class UntilReturn(EnteredRegion):
    """Casts are off until a frame returns."""

    __slots__ = ("_frame", "_off")

    def __init__(self, frame: types.FrameType) -> None:
        self._frame, self._off, self.key = frame, state.current_state().off, None

    @property
    def now(self) -> Off | None:  # type: ignore[override]  # an EnteredRegion has an attribute
        """Return the state while the frame is on the stack."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return None if frame is None else self._off


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


# --- captured graphs, whose replays write and read by address -------------------------------------------------------------------

# The classes of captured graphs that torch may have.
# on Gaudi: a step is captured by torch.hpu.HPUGraph.capture_begin(), which is there before convert(), and a replay writes by address.
_GRAPHS = (("cuda", "CUDAGraph"), ("xpu", "XPUGraph"), ("hpu", "HPUGraph"), ("accelerator", "Graph"))


def _install_captured_graphs() -> None:
    """Until patches.restore(): no copy of a weight from outside of a capture is used in it, and none from inside after it."""
    for module, name in _GRAPHS:
        graph: Any = getattr(getattr(torch, module, None), name, None)
        if "capture_begin" in vars(graph or object):
            for method in ("capture_begin", "capture_end"):
                patches.rebind(graph, method, _after_a_write(getattr(graph, method)))


def _after_a_write(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        copies.wrote()
        return own(self, *args, **kwargs)

    return capture


# --- `__torch_dispatch__`, which torch calls below an op ------------------------------------------------------------------------


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


# --- what is assigned to a parameter's data, a gradient or a buffer is cast to the dtype that it had -----------------------------

_data, _grad = torch_private.data_of, torch_private.grad_of


class _Descriptor(property):
    __objclass__ = None  # torch 2.7's Dynamo reads it off every descriptor of Tensor


def _install_assignments() -> None:
    """Patch `Parameter.data`, `Tensor.grad` and the registration of buffers, until patches.restore()."""
    patches.rebind(torch.nn.Parameter, "data", _Descriptor(_data.__get__, _set_data, _data.__delete__, _data.__doc__))
    patches.rebind(torch.Tensor, "grad", _Descriptor(_grad.__get__, _set_grad, _grad.__delete__, _grad.__doc__))
    patches.wrap(ParametrizationList, "right_inverse", _keeping_dtype)
    handle = register_module_buffer_registration_hook(_keep_buffer_dtype)  # type: ignore[arg-type]  # torch uses what it returns
    patches.on_restore(handle.remove)


def _narrowing(value: Any, dtype: torch.dtype) -> bool:
    """Return True if casts are on and `value` would change the dtype of what it is assigned to."""
    return casting.castable(value) and value.dtype is not dtype and dtype in casting.CASTABLE and state.casts_enabled()


def _set_data(self: torch.Tensor, value: Any) -> None:
    # FSDP with a mixed-precision policy of its own assigns another dtype on purpose
    if _narrowing(value, self.dtype) and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed."):
        value = casting.cast(value, self.dtype)
    _data.__set__(self, value)
    copies.wrote()


def _set_grad(self: torch.Tensor, value: Any) -> None:
    try:
        _grad.__set__(self, value)
    except RuntimeError:  # torch takes no gradient of another dtype; zero_grad() and optimizers assign one to each parameter, so asked last
        if not _narrowing(value, self.dtype) or getattr(self, "grad_dtype", self.dtype) is not self.dtype:
            raise
        _grad.__set__(self, casting.cast(value, self.dtype))


def _keeping_dtype(right_inverse: Callable[..., None]) -> Callable[..., None]:
    """Return the method that computes what a parametrized parameter holds from a value that is assigned to it: in the dtype that it has."""
    uncast = without_casts(right_inverse)

    def assign(self: Any, value: Any) -> None:
        held = next(self.parameters(recurse=False), None)
        if held is not None and _narrowing(value, held.dtype):
            value = casting.cast(value, held.dtype)
        uncast(self, value)

    return assign


def _keep_buffer_dtype(module: torch.nn.Module, name: str, value: Any) -> torch.Tensor | None:
    old = module._buffers.get(name)
    if old is None or not _narrowing(value, old.dtype):
        return None
    return casting.cast(value, old.dtype)
