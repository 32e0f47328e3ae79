"""The random state of the CPU and of the devices that tensors are on, taken and put back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

Tensor = torch.Tensor
States: TypeAlias = list[tuple[Callable[[Any], Any], Any]]


def random_state(tensors: Iterable[Tensor]) -> States:
    """Of each generator that ops on these tensors draw from, the function that sets it and its state; a device may have none."""
    found: States = [(torch.set_rng_state, torch.get_rng_state())]
    for device in {t.device for t in tensors if not t.is_cpu}:
        # torch has no module for XLA
        # on Gaudi: torch.hpu has get_rng_state(device) and set_rng_state(state, device).
        module: Any = sys.modules.get("torch_xla.core.xla_model") if device.type == "xla" else getattr(torch, device.type, None)
        if not hasattr(module, "get_rng_state"):
            continue
        where = () if device.type == "mps" else (device,)  # of which there is only one
        found.append((functools.partial(_set, module, where), module.get_rng_state(*where)))
    return found


def put_back(states: States) -> None:
    """The generators go on from there."""
    for put, state in states:
        put(state)


def _set(module: Any, where: tuple[torch.device, ...], state: Any) -> None:
    module.set_rng_state(state, *where)
