"""Python code that torch calls below an op, `__torch_dispatch__`, runs with casts off (R8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import torch_private
from ..active import without_casts
from ..patching import patches, subclasses
from ..rules import outside


def install() -> None:
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
    return outside(without_casts(function))
