"""`habana_frameworks.torch.utils.experimental`: which Gaudi this is, which scripts ask for: none."""

from __future__ import annotations

import enum

__all__ = ["_get_device_type", "synDeviceType"]


class synDeviceType(enum.Enum):
    """The types of Habana's devices."""

    synDeviceGaudi = "Gaudi"
    synDeviceGaudi2 = "Gaudi2"
    synDeviceGaudi3 = "Gaudi3"


def _get_device_type() -> None:
    """None: no type of Gaudi."""
