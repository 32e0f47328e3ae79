"""The PatchedOps that are in torch's places: each calls the wrapper that the active policy has for its op, or torch's own function."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from .. import observe, torch_private
from ..active import state
from ..patching import PatchedMethod, PatchedOp
from ..torch_ops import Site

_get, _active_state = state.get, state.active_state
_SEQUENCES = frozenset({list, tuple})


class ActiveOp(PatchedOp):
    """Replaces a function of torch's.

    Where a `__torch_function__` is to be asked it is asked first, and the op is decided on when the function that it is handed is called:
    once, by what the handler gives to it. torch's C++ code hands out what has the method's name, which is a PatchedOp.
    """

    looks_in_lists = True  # torch asks the tensors in a list, too, that is its first argument

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op under the policy that is active here."""
        value = _get()
        wrapper = (value.now or _active_state(value)).replacements[self.original]
        if wrapper is None:
            return self.call(*args, **kwargs)
        if (
            has_torch_function(args)
            or (kwargs and has_torch_function(tuple(kwargs.values())))
            or (args and type(args[0]) in _SEQUENCES and self.looks_in_lists and has_torch_function(args[0]))
        ):
            return self._asking(wrapper, args, kwargs)
        return wrapper(*args, **kwargs)

    def _asking(self, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call for which torch asks a mode or an argument's class: the user's is asked first, as if nobody listened.

        Of what hmp's own mode and classes see, hmp decides first. So it does for classes of torch's that compute attention themselves.
        """
        modes = torch_private.function_modes()
        mode = torch_private.function_mode_at(modes - 1) if modes else None
        if mode is None:
            is_users = _asks_users(args, kwargs)
        elif mode is not observe.here.functions:
            is_users = not _is_hmps(type(mode))
        else:
            torch_private.pop_function_mode()
            try:  # an interrupt may come right after the call
                if modes > 1 or _asks_users(args, kwargs):
                    return self.call_handlers(wrapper, args, kwargs)
            finally:
                torch_private.push_function_mode(mode)
            is_users = False
        return self.call_handlers(wrapper, args, kwargs) if is_users else wrapper(*args, **kwargs)

    def call_handlers(self, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the `__torch_function__` of a mode or of an argument returns."""
        return self.call(*args, **kwargs)


class ActiveFunction(ActiveOp):
    """Replaces a builtin of a module, for which torch's C++ code hands out what has its name in a private one: it hands out itself."""

    def call_handlers(self, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the `__torch_function__` of a mode or of an argument returns."""
        return handle_torch_function(self, tuple(_flat((args, kwargs))), *args, **kwargs)


class ActiveMethod(ActiveOp, PatchedMethod):
    """Replaces a method of torch.Tensor, or a function that is written in Python, which hands out what torch has under its name."""

    looks_in_lists = False


class ActiveOperator(ActiveMethod):
    """Replaces a dunder of torch.Tensor, for which torch's C++ code hands out another function: `Tensor.add` for `__radd__`.

    A list may name the dunder alone (`radd`), so its own wrapper decides. A handler of the user's gets arguments that are cast, with the
    function that it gets from torch; that of torch's subclasses, which nobody sees, gets this object.
    """

    def call_handlers(self, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the wrapper does, or what the `__torch_function__` that subclasses inherit from torch.Tensor does."""
        asked = [value for value in _flat((args, kwargs)) if has_torch_function((value,))]
        if not torch_private.function_modes() and all(getattr(each.__torch_function__, "__func__", None) is _INHERITED for each in asked):
            return handle_torch_function(self, asked, *args, **kwargs)
        return wrapper(*args, **kwargs)


_INHERITED: Any = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


class ActiveClosure(ActiveFunction, PatchedMethod):
    """Replaces a function that is written in Python and hands out itself, for it closes over itself."""

    looks_in_lists = False


class ActiveComposite(PatchedMethod):
    """Replaces a function that is written in Python and asks no `__torch_function__`: what it calls does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op under the policy that is active here."""
        value = _get()
        wrapper = (value.now or _active_state(value)).replacements[self.original]
        return (self.call if wrapper is None else wrapper)(*args, **kwargs)


def kind_for(site: Site) -> type[PatchedOp]:
    """Return the class of what replaces the function of a site."""
    original: Any = site.original
    if isinstance(original, types.FunctionType):
        if "handle_torch_function" not in original.__code__.co_names or original.__module__ in torch_private.ASKING_NO_MODE:
            return ActiveComposite
        return ActiveClosure if any(cell.cell_contents is original for cell in original.__closure__ or ()) else ActiveMethod
    if isinstance(site.owner, type) and hasattr(original, "__get__"):
        return ActiveOperator if site.attribute.startswith("__") else ActiveMethod
    return ActiveFunction


KINDS = ActiveFunction, ActiveMethod, ActiveOperator, ActiveClosure, ActiveComposite


def _asks_users(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if torch asks an argument's class that may be the user's. No mode is active here."""
    return any(has_torch_function((value,)) and not _is_decided_first(type(value)) for value in _flat((args, kwargs)))


def _is_decided_first(kind: type) -> bool:
    """Return True if hmp decides before the class is asked: one of its own, or of torch's that compute attention by themselves."""
    return _is_hmps(kind) or kind.__module__.startswith(torch_private.COMPUTING_ATTENTION)


def _is_hmps(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == "hmp"


def _flat(value: Any) -> Iterator[Any]:
    """Yield the objects in nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _flat(each)
    else:
        yield value
