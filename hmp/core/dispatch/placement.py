"""Puts a PatchedOp in the place of each torch function that a policy changes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

from ..patching import PatchedOp, patches, references, unpatched_op
from ..torch_ops import Site
from ..torch_patches import autocast, late_imports, override_tables
from ..torch_private import BUILTIN_FINDER, IN_VARIABLE_FUNCTIONS, builtin_table, reset_dynamo
from .active_ops import ActiveBody, ActiveFunction, ActiveMethod, ActiveOp, ActiveOperator

_ops: dict[int, PatchedOp] = {}  # by the id of torch's builtin
_bodies: dict[types.FunctionType, PatchedOp] = {}


def install(sites: Iterable[Site]) -> None:
    """Put PatchedOps at the `sites` that have none, until patches.restore()."""
    if not _ops and not _bodies:
        override_tables.answer(own)
        late_imports.install(own)
        reset_dynamo()
        find = getattr(*BUILTIN_FINDER)
        patches.swap(find, _finding_patched(patches.unpatched(find)))
        patches.on_restore(_forget)
    fresh: dict[int, PatchedOp] = {}
    for site in sites:
        original = site.original
        if isinstance(original, types.FunctionType):
            if original not in _bodies:
                body = ActiveBody(original, patches.unpatched(original), site.where, site.attribute)
                patches.swap(original, body)
                _bodies[original] = body
            continue
        if id(original) not in _ops:
            _ops[id(original)] = fresh[id(original)] = _made(site)
        patches.rebind(site.owner, site.attribute, _ops[id(original)])
    if fresh:
        references.patch_names(fresh)


def _made(site: Site) -> PatchedOp:
    original: Any = site.original
    if isinstance(site.owner, type):
        is_method = hasattr(original, "__get__")
        kind = ActiveOp if not is_method else ActiveOperator if site.attribute.startswith("__") else ActiveMethod
        return kind(original, original, "torch", f"Tensor.{site.attribute}")
    is_in_class = getattr(original, "__name__", "") in IN_VARIABLE_FUNCTIONS
    return (ActiveFunction if is_in_class else ActiveOp)(original, original, site.where, site.attribute)


def own(function: Any) -> Any:
    """Return torch's own function for what hmp has put in its place, and any other object as it is."""
    return autocast.own(unpatched_op(function))


def patched(function: Any) -> Any:
    """Return the PatchedOp that replaces torch's builtin `function`, or `function` itself where none does."""
    op = _ops.get(id(function))
    return op if op is not None and op.original is function else function


def originals() -> dict[int, Any]:
    """The builtins of torch's that are replaced, by id."""
    return {id(op.original): op.original for op in _ops.values()}


def patched_ops() -> list[PatchedOp]:
    """All PatchedOps that replace builtins."""
    return list(_ops.values())


def patched_bodies() -> list[types.FunctionType]:
    """The functions that torch has written in Python whose bodies are replaced."""
    return list(_bodies)


def _finding_patched(original: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """A `_find_builtin` of torch.jit.script's that finds the op of a PatchedOp, too: scripted code runs without casts."""
    return lambda function: original(function) or original(own(function))


def _forget() -> None:
    # torch.jit.script may have filled its table while torch was patched
    table = builtin_table()
    for patched_op in _ops.values():
        op = table.pop(id(patched_op), None)
        if op is not None:
            table.setdefault(id(patched_op.original), op)
    _ops.clear()
    _bodies.clear()
    reset_dynamo()
