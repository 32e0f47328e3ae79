"""R9: modules are constructed with casts off, because scripts convert first and build the model later."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ..active import loading, state
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
    loading.install()
    for module_name, names in _LOADING.items():
        late_imports.after({module_name: functools.partial(_patch_loading, module_name, names)})
    patches.wrap(torch.nn.Module, "__init__", _late)


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
        patches.wrap_by_name(module_name, name, loading.while_loading)


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
        return loading.while_loading(bound) if is_call and loading.is_needed() else bound


def _patch_construction(cls: type) -> None:
    own = vars(cls).get("__init__")
    if own is None:
        # a mixin's __init__ that is found before nn.Module's
        owner = next((base for base in cls.__mro__ if "__init__" in vars(base)), object)
        if owner is not object and not issubclass(owner, torch.nn.Module):
            own = vars(owner)["__init__"]
    if own is not None and hasattr(own, "__get__") and not isinstance(own, InitWithoutCasts):
        patches.rebind(cls, "__init__", InitWithoutCasts(own))
    for name in _CONSTRUCTORS & vars(cls).keys():
        if isinstance(vars(cls)[name], (classmethod, staticmethod)):
            patches.wrap(cls, name, loading.while_loading)


def _late(base_init: Callable[..., None]) -> Callable[..., None]:
    """Return an nn.Module.__init__ for classes that got their `__init__` after they were made (dataclasses).

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


class UntilReturn(state.OffUntil):
    """A state in which nothing is cast until a frame returns."""

    __slots__ = ("_frame",)

    def __init__(self, frame: types.FrameType) -> None:
        super().__init__()
        self._frame = frame

    def has_ended(self) -> bool:
        """Return True if the frame is no longer on the stack."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None
