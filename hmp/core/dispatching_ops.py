"""The PatchedOps that are in torch's places: each calls the wrapper that the active policy has for its op, or torch's own function."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.fx
from torch.overrides import handle_torch_function, has_torch_function

from . import observe, torch_private
from .active import autocast, state
from .ops.sites import Site, as_held
from .patching import patches
from .patching.patched_op import PatchedMethod, PatchedOp, unpatched_op
from .torch_patches import imports

_get, _active_state = state.get, state.active_state
_SEQUENCES = frozenset({list, tuple})


class ActiveOp(PatchedOp):
    """Replaces a function of torch's.

    A `__torch_function__` of the user's is called before anything is cast. It gets a PatchedOp, and the op is cast when it calls that.
    It gets one outside the policy, too: a handler that compares with `is torch.nn.functional.conv2d` finds a PatchedOp there.
    """

    looks_in_lists = True  # torch asks the tensors in a list, too, that is its first argument

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op under the policy that is active here."""
        value = _get()
        wrapper = (value.now or _active_state(value)).replacements[self.original]
        if wrapper is None:
            wrapper = self.call
        if (
            has_torch_function(args)
            or (kwargs and has_torch_function(tuple(kwargs.values())))
            or (args and type(args[0]) in _SEQUENCES and self.looks_in_lists and has_torch_function(args[0]))
        ):
            return self._asking(wrapper, args, kwargs)
        return wrapper(*args, **kwargs)

    def _asking(self, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call for which torch calls the `__torch_function__` of a mode or of an argument's class.

        A user's handler is called before the op is cast. hmp's own mode and classes, and torch's classes that compute attention
        themselves, get arguments that are cast. hmp's mode is left out while it is decided whether a user's handler is there, too.
        """
        modes = torch_private.function_modes()
        mode = torch_private.function_mode_at(modes - 1) if modes else None
        if mode is None:
            is_users = _asks_users(args, kwargs)
        elif mode is not observe.here.functions:
            is_users = not _is_hmps(type(mode))
        else:
            torch_private.pop_function_mode()
            try:
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
    """Replaces a builtin of a module. torch would pass handlers a private function for it; this passes itself."""

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


# --- in their places -------------------------------------------------------------------------------------------------------

_ops: dict[int, PatchedOp] = {}  # by the id of torch's function


def install(sites: Iterable[Site]) -> None:
    """Put PatchedOps at the `sites` that have none, until patches.restore()."""
    if not _ops:
        imports.install()
        torch_private.reset_dynamo()
        patches.wrap(*torch_private.BUILTIN_FINDER, _finding_patched)
        patches.on_restore(_forget)
    for site in sites:
        op = _ops.get(id(site.original))
        if op is None:
            op = _ops[id(site.original)] = _made(site)
            patches.replaces(op, as_held(site.original))
        patches.rebind(site.owner, site.attribute, _as_held(site, op), over=site.original)


def _as_held(site: Site, op: PatchedOp) -> Any:
    """Return the PatchedOp as a static or class method where the function is one: of a user's class."""
    if not isinstance(site.owner, type) or site.owner is torch.Tensor:
        return op
    held = inspect.getattr_static(site.owner, site.attribute)
    return type(held)(op) if isinstance(held, (staticmethod, classmethod)) else op


def _made(site: Site) -> PatchedOp:
    original: Any = site.original
    where, path = ("torch", f"Tensor.{site.attribute}") if site.owner is torch.Tensor else (site.where, site.attribute)
    if isinstance(original, types.FunctionType) and not str(original.__module__).startswith("torch."):
        where, path = original.__module__, original.__qualname__  # the user's
    return kind_for(site)(original, original, where, path)


def unpatched(function: Any) -> Any:
    """Return torch's own function for what hmp has put in its place, and any other object as it is."""
    return autocast.unpatched(patches.original(unpatched_op(function)))


def patched(function: Any) -> Any:
    """Return the PatchedOp that replaces torch's `function`, or `function` itself where none does."""
    op = _ops.get(id(function))
    return op if op is not None and op.original is function else function


def originals() -> dict[int, Any]:
    """Return the functions that are replaced wherever they are found, by id: ops, and functions that are never cast."""
    return {id(function): function for function in patches.originals().values()}


def patched_ops() -> list[PatchedOp]:
    """Return all PatchedOps that replace functions of torch's."""
    return list(_ops.values())


def _finding_patched(original: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Return a `_find_builtin` of torch.jit.script's that finds the op of a PatchedOp, too: scripted code runs without casts."""
    return lambda function: original(function) or original(unpatched(function))


def follow_graphs() -> None:
    """Trace graphs of torch.fx with torch's own functions, and let an Interpreter call their replacements, until patches.restore().

    A graph is cast under the policy that is active where it runs, as its generated code is.
    """
    patches.wrap(torch.fx.Interpreter, "call_function", _with_patched)
    patches.wrap(torch.fx.Proxy, "__torch_function__", _with_own)


def _with_own(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cls, function, *rest: original(cls, unpatched_op(function), *rest)


def _with_patched(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, target, args, kwargs: original(self, patched(target), args, kwargs)


def _forget() -> None:
    # torch.jit.script may have filled its table while torch was patched
    table = torch_private.builtin_table()
    for patched_op in _ops.values():
        op = table.pop(id(patched_op), None)
        if op is not None:
            table.setdefault(id(patched_op.original), op)
    _ops.clear()
    torch_private.reset_dynamo()
