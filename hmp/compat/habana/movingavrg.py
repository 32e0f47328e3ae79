"""`habana_frameworks.torch.hpex.movingavrg`: the exponential moving average of a model that detection scripts keep."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection

import torch

from ...core.active import disable_casts
from .optimizer_parts import checked

__all__ = ["FusedEMA"]


class FusedEMA:
    """`ema`, a copy of the model in evaluation mode, whose parameters and buffers follow the model's slowly.

    After the n-th `update` they are `d * ema + (1 - d) * model`, where `d = decay * (1 - exp(-n / 2000))` lets them follow faster at the
    beginning; `updates` is where to begin to count. What is no floating-point tensor is the model's.
    """

    def __init__(self, model: torch.nn.Module, decay: float = 0.9999, updates: int = 0) -> None:
        checked("FusedEMA", decay=decay, updates=updates)
        self.ema = copy.deepcopy(_inner(model)).eval().requires_grad_(False)
        self.updates = updates
        self.base_decay = decay

    def decay(self, updates: float) -> float:
        """The decay of the update of that number."""
        return self.base_decay * (1 - math.exp(-updates / 2000))

    @torch.no_grad()
    @disable_casts
    def update(self, model: torch.nn.Module) -> None:
        """Follows the model by one step."""
        self.updates += 1
        decay = self.decay(self.updates)
        theirs = _inner(model).state_dict()
        for name, ours in self.ema.state_dict().items():
            value = theirs[name].to(ours.device)
            if ours.is_floating_point():
                ours.copy_(ours * decay + value.to(ours.dtype) * (1 - decay))
            else:
                ours.copy_(value)

    def update_attr(
        self, model: torch.nn.Module, include: Collection[str] = (), exclude: Collection[str] = ("process_group", "reducer")
    ) -> None:
        """Takes the model's public attributes over, of `include` where it names any."""
        for name, value in vars(model).items():
            if (not include or name in include) and not name.startswith("_") and name not in exclude:
                setattr(self.ema, name, value)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model in a wrapper of data parallelism."""
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        inner: torch.nn.Module = model.module
        return inner
    return model
