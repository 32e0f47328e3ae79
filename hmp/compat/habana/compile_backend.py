"""`torch.compile(backend="hpu_backend")` compiles with torch's own default backend, for the device that stands for "hpu"."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ..import_finders import after_import
from .replacements import Replacements

_NAME = "hpu_backend"
_REGISTRY = "torch._dynamo.backends.registry"


def install(replaced: Replacements) -> None:
    """Registers the backend once a program has imported torch's compiler, until `replaced.undo()`."""
    replaced.on_undo(after_import(_REGISTRY, functools.partial(_register, replaced)))


def _register(replaced: Replacements, registry: types.ModuleType) -> None:
    if _NAME in registry._BACKENDS:
        return
    registry.register_backend(compile_graph, name=_NAME)
    for table in (registry._BACKENDS, registry._COMPILER_FNS):
        replaced.on_undo(functools.partial(table.pop, _NAME, None))


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """What torch's default backend makes of the graph; options of Habana's compiler mean nothing to it."""
    import torch._dynamo.backends.registry as registry

    return registry.lookup_backend("inductor")(graph, inputs)
