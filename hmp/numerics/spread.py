"""What was measured on each rank as one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .collectives import default_store
from .comparison import Comparison


def farthest(model: torch.nn.Module, found: Comparison) -> Comparison:
    """The comparison of the rank whose output is farthest from float32, the same on every rank; that of this process where no other
    computes the model with it."""
    if default_store() is None or not _is_spread(model):
        return found
    every: list[Comparison] = _gathered(found)
    errors = [-1.0 if each.output is None else each.output for each in every]
    rank = errors.index(max(errors))
    others = ", ".join(f"{error:.2g} on rank {at}" for at, error in enumerate(errors))
    note = f"of rank {rank} of {len(every)}, whose output is farthest from float32: {others}"
    return replace(every[rank], rank=rank, notes=(*every[rank].notes, note))


def _is_spread(model: torch.nn.Module) -> bool:
    """Whether every process computes its part of the model."""
    ranks = torch.distributed.get_world_size()
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]  # DTensors
    return any(module.process_group.size() == ranks for module in wrapped) or any(mesh.size() == ranks for mesh in meshes)


def _gathered(mine: Any) -> list[Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return every
