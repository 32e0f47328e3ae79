"""Modules of torch.jit get float32 inputs where their code is float32: scripted code has no casts, and what stands before it is cast.

torch.autocast casts inside such a module. Code that casts to a low dtype itself, as a trace made under casts does, is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..active import state
from ..casting import cast_call, each_castable
from ..patching import patches
from ..rules import lost_writes
from ..torch_private import is_any_autocast_enabled

_LOW = {15: torch.bfloat16, 5: torch.float16}  # by the constants that graphs have for them
# module → the dtypes of the tensors in its code (torch.jit.freeze puts parameters there), and the low ones that the code casts to
_in_code: WeakKeyDictionary[Any, frozenset[torch.dtype]] = WeakKeyDictionary()


def install() -> None:
    """Patches calls of modules of torch.jit, until patches.restore()."""
    patches.on_restore(_in_code.clear)
    patches.rebind(torch.jit.ScriptModule, "__call__", _with_wide_inputs(torch.jit.ScriptModule.__call__))


def _with_wide_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.casts_enabled() and not is_any_autocast_enabled():
            given = {tensor.dtype for tensor in each_castable((*args, *kwargs.values()))}
            if not given.isdisjoint(_LOW.values()) and _dtypes(self) == {torch.float32}:
                wide = cast_call(args, kwargs, torch.float32, lost_writes.watched_cast)
                run = functools.partial(original, self)
                return lost_writes.call(run, f"a {self.original_name} of torch.jit", wide, (args, kwargs), ())
        return original(self, *args, **kwargs)

    return call


def _dtypes(module: Any) -> set[torch.dtype]:
    """The floating dtypes of all that the module holds and of what is in its code."""
    if module not in _in_code:
        _in_code[module] = frozenset(_of_code(module.inlined_graph))
    return {tensor.dtype for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()} | _in_code[module]


def _of_code(graph: Any) -> Iterator[torch.dtype]:
    for node in graph.findAllNodes("prim::Constant"):
        value = node.output().toIValue()
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value.dtype
    for node in graph.findAllNodes("aten::to"):
        constants = [each.toIValue() for each in node.inputs() if each.node().kind() == "prim::Constant"]
        yield from (_LOW[value] for value in constants if type(value) is int and value in _LOW)
