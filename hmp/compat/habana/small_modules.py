"""Modules of Habana's that have few names: lazy mode and libraries, which there are not here, AMP, which Gaudi this is, and counts."""

from __future__ import annotations

import enum
from typing import Any

import torch

from . import hpu
from .device_map import standing
from .nothing import does_nothing

__all__ = [
    "GradScaler",
    "_get_device_type",
    "autocast",
    "hpu",
    "is_habana_avaialble",
    "is_habana_available",
    "is_lazy",
    "load_habana_module",
    "metric_global",
    "metric_localcontext",
    "synDeviceType",
]


def is_lazy() -> bool:
    """False: ops run when they are called."""
    return False


def load_habana_module() -> None:
    """Nothing: the device "hpu" is mapped since the shim was installed."""


def is_habana_available() -> bool:
    """Whether a device stands for "hpu"."""
    return hpu.is_available()


is_habana_avaialble = is_habana_available  # so spelled in older releases, and in the scripts written for them


class autocast(torch.autocast):
    """`torch.autocast("hpu")`; bfloat16 where no dtype is given."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        super().__init__("hpu", dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for the device that stands for "hpu"."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(standing().type, *args, **kwargs)


class synDeviceType(enum.Enum):
    """The types of Habana's devices."""

    synDeviceGaudi = "Gaudi"
    synDeviceGaudi2 = "Gaudi2"
    synDeviceGaudi3 = "Gaudi3"


def _get_device_type() -> None:
    """None: no type of Gaudi."""


class _Metric:
    """What is counted."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stats(self) -> list[tuple[str, int]]:
        """How often it happened and how long it took: never and not at all."""
        return [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0)]

    def reset(self) -> None:
        """Nothing."""

    def __enter__(self) -> _Metric:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


_WHY = "no graph is compiled, so that all counts are 0"
metric_global = does_nothing("metric_global", _WHY, _Metric)
metric_localcontext = does_nothing("metric_localcontext", _WHY, _Metric)
