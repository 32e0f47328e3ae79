"""The state of modules is never narrowed: construction runs with casts off, and assignments keep their dtype (R9)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from . import casting, patches, state

# getset descriptors; torch's annotations speak of the values behind them
_data: Any = torch._C.TensorBase.data
_grad: Any = torch._C.TensorBase.grad


def install() -> None:
    """Puts everything of this module in place, until patches.restore()."""
    _mute_construction()
    patches.rebind(torch.nn.Parameter, "data", property(_data.__get__, _set_data, _data.__delete__, _data.__doc__))
    patches.rebind(torch.Tensor, "grad", property(_grad.__get__, _set_grad, _grad.__delete__, _grad.__doc__))
    handle = register_module_buffer_registration_hook(_keep_buffer_dtype)  # type: ignore[arg-type]  # torch uses what it returns
    patches.on_restore(handle.remove)


class _QuietInit:
    """Stands for a class's `__init__`: the outermost one of a construction runs with casts off, the ones it calls run plainly.

    A descriptor and no wrapper: frames between a subclass's `__init__` and its base's would hide the arguments from code that
    collects them by walking the stack, and `Class.__init__` stays the very function that was there.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = self.function.__get__(instance, owner)
        if instance is None or not state.casts_enabled():
            return bound

        def quiet_init(*args: Any, **kwargs: Any) -> None:
            state.call_without_casts(bound, *args, **kwargs)

        return quiet_init


def _mute_construction() -> None:
    todo: list[type] = [torch.nn.Module]
    seen = set(todo)
    while todo:
        cls = todo.pop()
        subclasses: list[type] = type.__subclasses__(cls)
        for subclass in subclasses:
            if subclass not in seen:
                seen.add(subclass)
                todo.append(subclass)
                _mute_init(subclass)
    own: Any = vars(torch.nn.Module).get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        if own is None:
            super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        else:
            own.__get__(None, cls)(**kwargs)
        _mute_init(cls)

    patches.rebind(torch.nn.Module, "__init_subclass__", classmethod(init_subclass))


def _mute_init(cls: type) -> None:
    own = vars(cls).get("__init__")
    if own is None:
        # a mixin's __init__ that is found before nn.Module's
        owner = next((base for base in cls.__mro__ if "__init__" in vars(base)), object)
        if owner is object or issubclass(owner, torch.nn.Module):
            return
        own = vars(owner)["__init__"]
    if hasattr(own, "__get__") and not isinstance(own, _QuietInit):
        patches.rebind(cls, "__init__", _QuietInit(own))


def _narrowing(value: Any, dtype: torch.dtype) -> bool:
    """Whether casts are on here and `value` would change the dtype of what it is assigned to."""
    return casting.castable(value) and dtype in casting.CASTABLE and value.dtype is not dtype and state.casts_enabled()


def _set_data(self: torch.Tensor, value: Any) -> None:
    # torch's own modules (FSDP, Module.to) assign another dtype on purpose
    if _narrowing(value, self.dtype) and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
        value = casting.cast(value, self.dtype)
    _data.__set__(self, value)


def _set_grad(self: torch.Tensor, value: Any) -> None:
    if _narrowing(value, self.dtype) and getattr(self, "grad_dtype", self.dtype) is self.dtype:
        value = casting.cast(value, self.dtype)
    _grad.__set__(self, value)


def _keep_buffer_dtype(module: torch.nn.Module, name: str, value: Any) -> torch.Tensor | None:
    held = module._buffers.get(name)
    if held is None or not _narrowing(value, held.dtype):
        return None
    return casting.cast(value, held.dtype)
