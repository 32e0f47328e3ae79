"""Modules are constructed and loaded with casts off (rule R9), because scripts convert first and build the model later."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..active import EnteredRegion, Off, state, without_casts
from ..patching import patches, subclasses
from . import late_imports

# Class methods that construct a model and load or compute its state.
_CONSTRUCTORS = frozenset({"from_pretrained", "from_config", "_from_config", "load_from_checkpoint"})

# module → its functions that load, save or compute the state of modules; these modules may be imported late
_LOADING = {
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


def install() -> None:
    """Turn casts off in the loading of every module, and from nn.Module.__init__ on in its construction, until patches.restore().

    That is enough for `apply()`: a call of a model seldom constructs another.
    """
    patches.wrap(torch.nn.Module, "__init__", _late)
    patches.wrap(ThreadPoolExecutor, "submit", _submitting)
    for module_name, names in _LOADING.items():
        late_imports.after({module_name: functools.partial(_patch_loading, module_name, names)})


def _submitting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `submit` whose tasks run without casts where hmp has switched them off: transformers loads weights in a pool of threads."""

    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return original(self, without_casts(fn) if state.is_off_by_hmp() else fn, *args, **kwargs)

    return submit


def is_in_classes() -> bool:
    """Return True after `install_in_classes()`."""
    return patches.rebound(torch.nn.Module, "__init_subclass__")  # the last step


def install_in_classes() -> None:
    """Turn casts off in the whole construction of every module, of classes made later too, until patches.restore().

    For policies that are active outside of the calls of models.
    """
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


def _patch_loading(module_name: str, names: tuple[str, ...]) -> None:
    for name in names:
        patches.wrap_by_name(module_name, name, without_casts)


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
