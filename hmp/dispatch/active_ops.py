"""The PatchedOps that are in torch's places: each calls the wrapper that the active policy has for its op, or torch's own function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from .. import torch_private
from ..context import state
from ..patching import PatchedMethod, PatchedOp

_get, _in_force = state.get, state.in_force
_SEQUENCES = frozenset({list, tuple})


class ActiveOp(PatchedOp):
    """Replaces a function of torch for which torch's C++ code hands out what has its name in a module: this object (R19)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = _get()
        wrapper = (value.now or _in_force(value)).replacements.get(self.original)
        return (self.call if wrapper is None else wrapper)(*args, **kwargs)


class ActiveMethod(ActiveOp, PatchedMethod):
    """Replaces a method of torch.Tensor."""


class ActiveFunction(ActiveOp):
    """Replaces a function that torch's C++ code looks up where Python cannot write, and hands out without casts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = _get()
        wrapper = (value.now or _in_force(value)).replacements.get(self.original)
        if wrapper is None:
            return self.call(*args, **kwargs)
        if (
            has_torch_function(args)
            or (kwargs and has_torch_function(tuple(kwargs.values())))
            or (args and type(args[0]) in _SEQUENCES and has_torch_function(args[0]))
        ) and _is_users_handler(args, kwargs):
            return handle_torch_function(self, tuple(_flat((args, kwargs))), *args, **kwargs)
        return wrapper(*args, **kwargs)


# The code of the calls above.
CODES = frozenset(kind.__call__.__code__ for kind in (ActiveOp, ActiveFunction))


# The `__torch_function__` that subclasses of Tensor inherit, and the disabled one.
_DEFAULT_HANDLERS = (torch.Tensor.__torch_function__.__func__, torch_private.no_torch_function)  # type: ignore[attr-defined]


def _is_users_handler(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the `__torch_function__` that the call is about to reach is the user's, not hmp's or that of a torch.device."""
    modes = torch_private.function_modes()
    if modes:
        return not _is_ours(type(torch_private.function_mode_at(modes - 1)).__module__)
    return any(map(_has_handler, _flat((args, kwargs))))


def _has_handler(value: Any) -> bool:
    kind = type(value)
    handler = getattr(kind, "__torch_function__", None)
    return handler is not None and getattr(handler, "__func__", handler) not in _DEFAULT_HANDLERS and not _is_ours(kind.__module__)


def _is_ours(module: Any) -> bool:
    return module == torch_private.device_mode.__name__ or str(module).partition(".")[0] == "hmp"


def _flat(value: Any) -> list[Any]:
    """Return the objects in nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in _flat(item)]
    return [each for item in value.values() for each in _flat(item)] if isinstance(value, dict) else [value]
