"""Habana's backends, which torch knows by name: "hccl" of torch.distributed, and "hpu_backend" of torch.compile."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from ..import_finders import after_import
from .device_map import actual_device, mapped
from .replacements import IN_PLACE, AttributeReplacements

__all__ = ["initialize_distributed_hpu"]

_HCCL = "hccl"
_COMPILER = "hpu_backend"
_COMPILER_REGISTRY = "torch._dynamo.backends.registry"


def register_hccl() -> None:
    """Register "hccl" until the shim is uninstalled: NCCL on CUDA, and Gloo elsewhere. Importing Habana's module calls this."""
    backend = torch.distributed.Backend
    if _HCCL in backend.backend_list:
        return
    # register_backend() changes torch's own tables: replace them by copies, which are taken away again
    for table in ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins"):
        IN_PLACE.put(backend, table, getattr(backend, table).copy())
    IN_PLACE.put(backend, _HCCL.upper(), _HCCL)
    backend.register_backend(_HCCL, _process_group, devices=[actual_device().type])
    start = on_mapped_device(torch.distributed.init_process_group)
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        IN_PLACE.put(module, "init_process_group", start)


def on_mapped_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return init_process_group or new_group with `device_id="hpu"` mapped; the CPU takes none."""

    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("device_id")
        device = mapped(given)
        if device is not given:
            index = device.index if device.index is not None or device.type == "cpu" else torch.get_device_module(device).current_device()
            kwargs["device_id"] = None if device.type == "cpu" else torch.device(device.type, index)
        return original(*args, **kwargs)

    return start


def _process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    if actual_device().type == "cuda":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Return world size, rank and local rank, and set them in the environment.

    Args:
        world_size: The number of processes; None takes the launcher's from the environment, else 1.
        rank: The number of this process; None takes the launcher's, else 0.
        local_rank: Its number in this node; None takes the launcher's, else -1, which scripts read as "no launcher".

    Returns:
        World size, rank and local rank.
    """
    given = {"WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": local_rank}
    theirs = {"WORLD_SIZE": "OMPI_COMM_WORLD_SIZE", "RANK": "OMPI_COMM_WORLD_RANK", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK"}
    for name, value in given.items():
        if value is not None:
            os.environ[name] = str(value)
        elif name not in os.environ and theirs[name] in os.environ:
            os.environ[name] = os.environ[theirs[name]]
    values = [int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "-1"))]
    return values[0], values[1], values[2]


def install_compiler(replaced: AttributeReplacements) -> None:
    """Register "hpu_backend" as soon as a program has imported torch's compiler, until `replaced.undo()`."""
    replaced.on_undo(after_import(_COMPILER_REGISTRY, functools.partial(_register_compiler, replaced)))


def _register_compiler(replaced: AttributeReplacements, registry: types.ModuleType) -> None:
    if _COMPILER in registry._BACKENDS:
        return
    registry.register_backend(compile_graph, name=_COMPILER)
    for table in (registry._BACKENDS, registry._COMPILER_FNS):
        replaced.on_undo(functools.partial(table.pop, _COMPILER, None))


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Compile the graph with torch's default backend; options of Habana's compiler have no effect."""
    import torch._dynamo.backends.registry as registry

    return registry.lookup_backend("inductor")(graph, inputs)
