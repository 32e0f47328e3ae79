"""`lightning_habana.pytorch.strategies`: Lightning's strategies for one device and for several, on the devices that stand for "hpu"."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from ..habana import hccl
from ..habana.device_map import standing
from ..lightning_homes import STAND_IN, preferred, without_gaudi


class Strategies(NamedTuple):
    """The strategies for the Trainer of one package."""

    SingleHPUStrategy: Any
    HPUParallelStrategy: Any
    HPUDDPStrategy: Any


class _Parallel:
    """What the strategy for several processes has in its own way, over the DDPStrategy that stands behind it."""

    local_rank: int

    @property
    def root_device(self) -> torch.device:
        """The device of this process: the one of its rank in the node."""
        device: torch.device = super().root_device  # type: ignore[misc]
        return torch.device("hpu", self.local_rank) if device.type == "hpu" and device.index is None else device

    def setup_distributed(self) -> None:
        """Brings the processes together."""
        hccl.on_import()  # from then on init_process_group() takes an "hpu" as its device_id
        super().setup_distributed()  # type: ignore[misc]

    def determine_ddp_device_ids(self) -> None:
        """None: the model is on the device already."""

    def _get_process_group_backend(self) -> str:
        """NCCL on CUDA and else Gloo by their own names, so that Lightning knows what each can do; another backend as it was given."""
        given: str | None = self._process_group_backend  # type: ignore[has-type]
        if given in (None, "hccl"):
            given = "nccl" if standing(self.root_device).type == "cuda" else "gloo"
        self._process_group_backend = given
        return str(given)


@functools.cache
def strategies_of(home: str) -> Strategies:
    """The strategies for the Trainer of that package."""
    theirs: Any = importlib.import_module(f"{home}.strategies")

    class SingleHPUStrategy(theirs.SingleDeviceStrategy):  # type: ignore[misc]
        """`Trainer(strategy=SingleHPUStrategy())`: one process, on the device that stands for "hpu"."""

        strategy_name = "hpu_single"

        def __init__(self, device: Any = "hpu", *args: Any, **kwargs: Any) -> None:
            self._given = (device, *args), kwargs
            super().__init__(device, *args, **kwargs)

    class HPUParallelStrategy(_Parallel, theirs.DDPStrategy):  # type: ignore[misc]
        """`Trainer(devices=2, strategy=HPUParallelStrategy())`: a process for each device; it takes what DDPStrategy takes."""

        strategy_name = "hpu_parallel"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._given = args, kwargs
            super().__init__(*args, **kwargs)

    class HPUDDPStrategy(HPUParallelStrategy):
        """HPUParallelStrategy under its newer name."""

        strategy_name = "hpu_ddp"

    made = Strategies(SingleHPUStrategy, HPUParallelStrategy, HPUDDPStrategy)
    for each in made:
        each.__qualname__, each.__module__ = each.__name__, __name__
    return made


SingleHPUStrategy, HPUParallelStrategy, HPUDDPStrategy = strategies_of(preferred(STAND_IN))


def taken_by(home: str, strategy: Any) -> Any:
    """`strategy`; one that was made for the other package's Trainer becomes what it would be if it had been made for this one's."""
    for other in without_gaudi():
        if other != home and type(strategy) in strategies_of(other):
            args, kwargs = strategy._given
            strategy.__class__ = getattr(strategies_of(home), type(strategy).__name__)
            vars(strategy).clear()
            strategy.__init__(*args, **kwargs)
    return strategy
