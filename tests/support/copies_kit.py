"""Models that use weights and activations again, how many casts a function makes, and what is left in memory after it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

LOW = torch.bfloat16


def casts_of(function: Callable[[], Any], warm: int = 3) -> int:
    """How many casts torch makes in one more call of the function."""
    for _ in range(warm):  # which weights are used again is learnt from the calls before
        function()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return sum(event.count for event in found.key_averages() if event.key == "aten::_to_copy")


def bytes_alive() -> int:
    """The bytes of the storages of all tensors that are alive."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found if each.layout is torch.strided}
    return sum(storages.values())


class Heads(nn.Module):
    """Queries, keys and values of one activation of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.heads = nn.ModuleList(nn.Linear(512, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return torch.cat([head(x) for head in self.heads])


class Steps(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Any:
        state = None
        for _ in range(6):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state
