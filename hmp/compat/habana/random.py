"""`habana_frameworks.torch.hpu.random`: the random state of the device that "hpu" is mapped to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .device_map import actual_device, device_module, forwarded

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def get_rng_state(device: Any = "hpu") -> torch.Tensor:
    """Return the state of the device's generator, a uint8 tensor. The CPU's is torch's default generator."""
    here = actual_device(device)
    state: torch.Tensor = torch.get_rng_state() if here.type == "cpu" else device_module().get_rng_state(here)
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices, in order."""
    count = 1 if actual_device().type == "cpu" else device_module().device_count()
    return [get_rng_state(index) for index in range(count)]


def set_rng_state(new_state: torch.Tensor, device: Any = "hpu") -> None:
    """Set a state that `get_rng_state` returned."""
    here = actual_device(device)
    if here.type == "cpu":
        torch.set_rng_state(new_state)
    else:
        device_module().set_rng_state(new_state, here)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states that `get_rng_state_all` returned."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


_cpu_generator = torch.default_generator


def _seed_cpu(seed: int) -> None:
    _cpu_generator.manual_seed(int(seed))


manual_seed = forwarded("manual_seed", _seed_cpu, "Seed the current device.")
manual_seed_all = forwarded("manual_seed_all", _seed_cpu, "Seed every device.")
seed = forwarded("seed", _cpu_generator.seed, "Seed the current device with a random number.")
seed_all = forwarded("seed_all", _cpu_generator.seed, "Seed every device with a random number.")
initial_seed = forwarded("initial_seed", _cpu_generator.initial_seed, "Return the seed of the current device.")
