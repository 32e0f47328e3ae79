"""`lightning_habana.pytorch.strategies`: Lightning's strategies for one device and for several, on "hpu"."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from ..habana import backends
from ..habana.device_map import actual_device
from ..lightning_packages import SHIM, preferred, without_gaudi


class Strategies(NamedTuple):
    """The strategies for the Trainer of one of Lightning's packages."""

    SingleHPUStrategy: Any
    HPUParallelStrategy: Any
    HPUDDPStrategy: Any


class _Parallel:
    """The mixin that turns DDPStrategy into that of "hpu"."""

    local_rank: int

    @property
    def root_device(self) -> torch.device:
        """The device of this process, by its local rank."""
        device: torch.device = super().root_device  # type: ignore[misc]
        return torch.device("hpu", self.local_rank) if device.type == "hpu" and device.index is None else device

    def setup_distributed(self) -> None:
        """Connect the processes."""
        backends.register_hccl()  # init_process_group() then takes an "hpu" as its device_id
        super().setup_distributed()  # type: ignore[misc]

    def determine_ddp_device_ids(self) -> None:
        """Return None: the model is on the device already."""

    def _get_process_group_backend(self) -> str:
        """Return "nccl" on CUDA and else "gloo", whose features Lightning knows; another backend as it was given."""
        given: str | None = self._process_group_backend  # type: ignore[has-type]
        if given in (None, "hccl"):
            given = "nccl" if actual_device(self.root_device).type == "cuda" else "gloo"
        self._process_group_backend = given
        return str(given)


@functools.cache
def strategies_of(package: str) -> Strategies:
    """Return the strategies for the Trainer of that package."""
    theirs: Any = importlib.import_module(f"{package}.strategies")

    class SingleHPUStrategy(theirs.SingleDeviceStrategy):  # type: ignore[misc]
        """One process on one device: `Trainer(strategy=SingleHPUStrategy())`."""

        strategy_name = "hpu_single"

        def __init__(self, device: Any = "hpu", *args: Any, **kwargs: Any) -> None:
            self._given = (device, *args), kwargs
            super().__init__(device, *args, **kwargs)

    class HPUParallelStrategy(_Parallel, theirs.DDPStrategy):  # type: ignore[misc]
        """A process for each device: `Trainer(devices=2, strategy=HPUParallelStrategy())`. Arguments are those of DDPStrategy."""

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


SingleHPUStrategy, HPUParallelStrategy, HPUDDPStrategy = strategies_of(preferred(SHIM))


def taken_by(package: str, strategy: Any) -> Any:
    """Return the strategy; one that was made for the other package's Trainer becomes one for the Trainer of this package."""
    for other in without_gaudi():
        if other != package and type(strategy) in strategies_of(other):
            args, kwargs = strategy._given
            strategy.__class__ = getattr(strategies_of(package), type(strategy).__name__)
            vars(strategy).clear()
            strategy.__init__(*args, **kwargs)
    return strategy
