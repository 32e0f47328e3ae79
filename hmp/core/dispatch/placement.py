"""Puts a PatchedOp instead of each torch function that a policy changes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx

from ..active import autocast
from ..patching import PatchedOp, patches, unpatched_op
from ..torch_ops import Site
from ..torch_ops.sites import as_held
from ..torch_patches import imports
from ..torch_private import BUILTIN_FINDER, SCRIPT_COMPILERS, builtin_table, reset_dynamo
from .dispatching_ops import kind_for

_ops: dict[int, PatchedOp] = {}  # by the id of torch's function


def install(sites: Iterable[Site]) -> None:
    """Put PatchedOps at the `sites` that have none, until patches.restore()."""
    if not _ops:
        imports.install()
        reset_dynamo()
        patches.wrap(*BUILTIN_FINDER, _finding_patched)
        for place in SCRIPT_COMPILERS:
            patches.wrap(*place, _compiling_own)
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


def _compiling_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler of torch.jit.script's that compiles torch's own function for one that replaces it."""
    return lambda *args, **kwargs: original(*map(unpatched, args), **{name: unpatched(each) for name, each in kwargs.items()})


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
    table = builtin_table()
    for patched_op in _ops.values():
        op = table.pop(id(patched_op), None)
        if op is not None:
            table.setdefault(id(patched_op.original), op)
    _ops.clear()
    reset_dynamo()
