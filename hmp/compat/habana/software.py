"""Habana's software as scripts query it: its libraries, lazy mode, the kind of Gaudi, counters of its compiler."""

from __future__ import annotations

import enum

from . import hpu
from .no_ops import no_op

__all__ = [
    "_get_device_type",
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
    """Return False: ops run when they are called."""
    return False


def load_habana_module() -> None:
    """Do nothing: `install()` has mapped the device "hpu"."""


def is_habana_available() -> bool:
    """Return True if "hpu" is mapped to a device."""
    return hpu.is_available()


is_habana_avaialble = is_habana_available  # the spelling of older releases, and of scripts for them


class synDeviceType(enum.Enum):
    """The types of Habana's devices."""

    synDeviceGaudi = "Gaudi"
    synDeviceGaudi2 = "Gaudi2"
    synDeviceGaudi3 = "Gaudi3"


def _get_device_type() -> None:
    """Return None: there is no Gaudi."""


class _Metric:
    """A counter of Habana's graph compiler."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stats(self) -> list[tuple[str, int]]:
        """Return how often the event happened and how long it took: 0."""
        return [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0)]

    def reset(self) -> None:
        """Do nothing."""

    def __enter__(self) -> _Metric:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


_NO_GRAPH = "no graph is compiled, so that all counts are 0"
metric_global = no_op("metric_global", _NO_GRAPH, _Metric)
metric_localcontext = no_op("metric_localcontext", _NO_GRAPH, _Metric)
