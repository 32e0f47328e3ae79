"""R9: what is assigned to a parameter's data, a gradient or a buffer is cast to the dtype that it had."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from .. import casting, copies
from ..active import state, without_casts
from ..patching import patches
from ..torch_private import data_of as _data
from ..torch_private import grad_of as _grad

_assign_grad = _grad.__set__


class _Descriptor(property):
    __objclass__ = None  # torch 2.7's Dynamo reads it off every descriptor of Tensor


def install() -> None:
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
        _assign_grad(self, value)
    except RuntimeError:  # torch takes no gradient of another dtype; zero_grad() and optimizers assign one to each parameter, so asked last
        if not _narrowing(value, self.dtype) or getattr(self, "grad_dtype", self.dtype) is not self.dtype:
            raise
        _assign_grad(self, casting.cast(value, self.dtype))


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
