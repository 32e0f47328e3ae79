"""`habana_frameworks.torch.hpu.random`: the random state of the device that stands for "hpu"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .device_map import forwarded, module, standing

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
    """The state of the device's random numbers, as a tensor of bytes. Of the CPU there is one, and it is torch's own."""
    here = standing(device)
    state: torch.Tensor = torch.get_rng_state() if here.type == "cpu" else module().get_rng_state(here)
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices, in order."""
    return [torch.get_rng_state()] if standing().type == "cpu" else [get_rng_state(index) for index in range(module().device_count())]


def set_rng_state(new_state: torch.Tensor, device: Any = "hpu") -> None:
    """Sets the state that `get_rng_state` gave."""
    here = standing(device)
    if here.type == "cpu":
        torch.set_rng_state(new_state)
    else:
        module().set_rng_state(new_state, here)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the states that `get_rng_state_all` gave."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


_of_cpu = torch.default_generator


def _seed_cpu(seed: int) -> None:
    _of_cpu.manual_seed(int(seed))


manual_seed = forwarded("manual_seed", _seed_cpu, "Seeds the current device.")
manual_seed_all = forwarded("manual_seed_all", _seed_cpu, "Seeds every device.")
seed = forwarded("seed", _of_cpu.seed, "Seeds the current device with a number that nobody knows before.")
seed_all = forwarded("seed_all", _of_cpu.seed, "Seeds every device with a number that nobody knows before.")
initial_seed = forwarded("initial_seed", _of_cpu.initial_seed, "The seed of the current device.")
