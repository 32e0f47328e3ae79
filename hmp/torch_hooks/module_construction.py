"""R9: modules are constructed with casts off, because scripts convert first and build the model later."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ..context import CompiledPolicy, ContextValue, CountsAsOpen, Off, state, without_casts
from ..patching import patches, references, stands_in, subclasses

# Class methods that construct a model and load or compute its state.
_CONSTRUCTORS = frozenset({"from_pretrained", "from_config", "_from_config", "load_from_checkpoint"})


def install() -> None:
    """Turns casts off in the construction of every module, of classes made later too, until patches.restore()."""
    for cls in subclasses(torch.nn.Module):
        _patch_construction(cls)
    own: Any = vars(torch.nn.Module).get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        if own is None:
            super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        else:
            own.__get__(None, cls)(**kwargs)
        references.make_static(cls, stands_in)
        if not isinstance(cls, type(torch.jit.ScriptModule)):  # which gives a class another `__init__` right after this
            _patch_construction(cls)

    patches.rebind(torch.nn.Module, "__init_subclass__", classmethod(init_subclass))
    base_init = torch.nn.Module.__init__
    patches.swap(base_init, _late(patches.unpatched(base_init)))


class InitWithoutCasts:
    """A class's `__init__`, which runs with casts off. A base's that it calls finds casts off, and is called directly.

    A descriptor, not a wrapper: a frame of hmp's between a subclass's `__init__` and its base's would hide the arguments from code that
    collects them by walking the stack; and `Class.__init__` stays the same function.
    """

    def __init__(self, function: Any) -> None:
        self.function = self.__wrapped__ = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = self.function.__get__(instance, owner)
        if instance is None or not state.casts_enabled():
            return bound
        return without_casts(bound)


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
        constructor = getattr(vars(cls)[name], "__func__", None)
        if isinstance(constructor, types.FunctionType):
            patches.swap(constructor, without_casts(patches.unpatched(constructor)))


def _late(base_init: Callable[..., None]) -> Callable[..., None]:
    """An nn.Module.__init__ for classes that got their `__init__` after they were made (dataclasses): where casts are on, it turns them off
    until that `__init__` returns."""

    def init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if state.casts_enabled():
            frame = _constructing_frame(self)
            if frame is not None:
                state.put(UntilReturn(state.get(), frame))
        base_init(self, *args, **kwargs)

    return init


def _constructing_frame(module: torch.nn.Module) -> types.FrameType | None:
    """The outermost frame on the stack whose first argument is `module`: the `__init__` that is being run."""
    found = None
    frame: types.FrameType | None = sys._getframe(3)  # past _late's function and the base class's own frame
    while frame is not None:
        names = frame.f_code.co_varnames
        if names and frame.f_locals.get(names[0]) is module:
            found = frame
        frame = frame.f_back
    return found


class UntilReturn(Off):
    """A state in which nothing is cast until a frame returns; from then on it acts as the state before."""

    __slots__ = ("_before", "_entered", "_frame")

    def __init__(self, before: ContextValue, frame: types.FrameType) -> None:
        super().__init__((before.now or state.in_force(before)).on)
        self.now = None
        self._before = before
        self._entered = CountsAsOpen(None)
        self._frame = frame

    def in_force(self) -> CompiledPolicy | Off:
        """`Off` while the frame is on the stack; the state before once it is not."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        if frame is not None:
            return self.on.off
        if state.get() is self:
            state.put(self._before)
        return self._before.now or state.in_force(self._before)
