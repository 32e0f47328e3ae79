"""`lightning_habana.pytorch.accelerator`: the device that "hpu" is mapped to, as an accelerator of Lightning's Trainer."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ... import HmpError
from ..habana import hpu
from ..lightning_packages import without_gaudi

_BASES = tuple(importlib.import_module(f"{package}.accelerators").Accelerator for package in without_gaudi())
_Accelerators: Any = type("_Accelerators", _BASES, {})


class HPUAccelerator(_Accelerators):  # type: ignore[misc]  # its bases are known when it is imported
    """The accelerator "hpu": `Trainer(accelerator=HPUAccelerator(), devices=1)`, or `Trainer(accelerator="hpu")`.

    On the CPU `devices` is the number of processes, any number. Of other devices it is at most the number of them.
    """

    def setup_device(self, device: torch.device) -> None:
        """Make the device the current one. Raise HmpError if it is not an "hpu"."""
        if device.type != "hpu":
            raise HmpError(f"HPUAccelerator expected a strategy on 'hpu', got one on {str(device)!r}; leave the strategy's device out")
        if device.index is not None:
            hpu.set_device(device)

    def teardown(self) -> None:
        """Do nothing: there is nothing to release."""

    def get_device_stats(self, device: torch.device | str | int | None) -> dict[str, int]:
        """Return Habana's memory_stats: bytes, and counts of allocations, which are 0 if the device does not count them."""
        return hpu.memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int] | None) -> int | None:
        """Return the number of devices. Raise HmpError if it is not a number >= 1, or more than there are."""
        if devices is None:
            return None
        try:
            count = int(devices)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            count = 0
        if count < 1 or isinstance(devices, (bool, float)):
            raise HmpError(f"devices= expected a number >= 1 or 'auto' for accelerator 'hpu', got {devices!r}")
        there = hpu.device_count()
        if count > there and hpu.get_device_name() != "cpu":
            raise HmpError(
                f"devices= expected at most {there}, the number of devices of 'hpu', got {devices!r}; map 'hpu' to the CPU for more"
            )
        return count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Return "hpu" once for each device; the strategy chooses that of a process."""
        return [torch.device("hpu")] * devices

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices for `devices="auto"`: all, or 1 on the CPU."""
        return hpu.device_count()

    @staticmethod
    def is_available() -> bool:
        """Return True if "hpu" is mapped to a device."""
        return hpu.is_available()

    @staticmethod
    def name() -> str:
        """Return the name in Lightning's registry."""
        return "hpu"

    @staticmethod
    def get_device_name() -> str:
        """Return the name of the device that "hpu" is mapped to."""
        return str(hpu.get_device_name())

    @staticmethod
    def is_lazy() -> bool:
        """Return False: ops run when they are called."""
        return False
