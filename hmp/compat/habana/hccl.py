"""`habana_frameworks.torch.distributed.hccl`, `core.hccl` of older releases: the backend "hccl" is NCCL on CUDA devices and else Gloo."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from .device_map import mapped, standing
from .replacements import IN_PLACE

__all__ = ["initialize_distributed_hpu"]

_NAME = "hccl"


def on_import() -> None:
    """Registers the backend, until the shim is taken away: called when a program imports Habana's module."""
    backend = torch.distributed.Backend
    if _NAME in backend.backend_list:
        return
    # the tables are torch's own and are changed by name: put copies there, and take them away again
    for table in ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins"):
        IN_PLACE.put(backend, table, getattr(backend, table).copy())
    IN_PLACE.put(backend, _NAME.upper(), _NAME)
    backend.register_backend(_NAME, _process_group, devices=[standing().type])
    start = _on_mapped_device(torch.distributed.init_process_group)
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        IN_PLACE.put(module, "init_process_group", start)


def _on_mapped_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group, whose `device_id` may be an "hpu"; the CPU takes none."""

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("device_id")
        device = mapped(given)
        if device is not given:
            index = device.index if device.index is not None or device.type == "cpu" else torch.get_device_module(device).current_device()
            kwargs["device_id"] = None if device.type == "cpu" else torch.device(device.type, index)
        return original(*args, **kwargs)

    return init_process_group


def _process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    if standing().type == "cuda":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """World size, rank and local rank: as given, else as the launcher set them in the environment, else 1, 0 and -1.

    A local rank of -1 tells scripts that no launcher started them.
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
