"""What a script asks of Habana's installation: its libraries, lazy mode, which Gaudi there is."""

from __future__ import annotations

import enum

from . import hpu

__all__ = ["_get_device_type", "hpu", "is_habana_avaialble", "is_habana_available", "is_lazy", "load_habana_module", "synDeviceType"]


def is_lazy() -> bool:
    """False: ops run when they are called."""
    return False


def load_habana_module() -> None:
    """Nothing: the device "hpu" is mapped since the shim was installed."""


def is_habana_available() -> bool:
    """Whether a device stands for "hpu"."""
    return hpu.is_available()


is_habana_avaialble = is_habana_available  # so spelled in older releases, and in the scripts written for them


class synDeviceType(enum.Enum):
    """The types of Habana's devices."""

    synDeviceGaudi = "Gaudi"
    synDeviceGaudi2 = "Gaudi2"
    synDeviceGaudi3 = "Gaudi3"


def _get_device_type() -> None:
    """None: no type of Gaudi."""
