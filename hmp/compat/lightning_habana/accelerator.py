"""`lightning_habana.pytorch.accelerator`: the device that stands for "hpu", as an accelerator of Lightning's Trainer."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ... import HmpError
from ..habana import hpu
from ..lightning_homes import without_gaudi

_of_lightning = [importlib.import_module(f"{home}.accelerators").Accelerator for home in without_gaudi()]
_Accelerators: Any = type("_Accelerators", tuple(_of_lightning), {})


class HPUAccelerator(_Accelerators):  # type: ignore[misc]  # its bases are known when it is imported
    """`Trainer(accelerator=HPUAccelerator(), devices=1)`; `Trainer(accelerator="hpu")` is the same.

    On the CPU any number of devices are that many processes; of other devices there are as many as there are.
    """

    def setup_device(self, device: torch.device) -> None:
        """Makes the device the current one. HmpError for one that is no "hpu"."""
        if device.type != "hpu":
            raise HmpError(f"HPUAccelerator runs on 'hpu', and the strategy's device is {str(device)!r}; give the strategy no device")
        if device.index is not None:
            hpu.set_device(device)

    def teardown(self) -> None:
        """Nothing: the device holds nothing that is the accelerator's."""

    def get_device_stats(self, device: torch.device | str | int | None) -> dict[str, int]:
        """The ten statistics of Habana's memory_stats: limit, bytes in use, counts of allocations (0 where the device does not count)."""
        return hpu.memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int] | None) -> int | None:
        """How many devices are asked for. HmpError for what is no number of them, and for more than there are."""
        if devices is None:
            return None
        try:
            count = int(devices)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            count = 0
        if count < 1 or isinstance(devices, (bool, float)):
            raise HmpError(f"devices={devices!r}: HPUAccelerator takes a number of devices, 1 or more, or 'auto'")
        there = hpu.device_count()
        if count > there and hpu.get_device_name() != "cpu":
            raise HmpError(f"devices={devices!r}: {there} stand for 'hpu' here; give that or less, or map it to the CPU")
        return count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The "hpu", once for each device; which one a process takes is its strategy's to say."""
        return [torch.device("hpu")] * devices

    @staticmethod
    def auto_device_count() -> int:
        """How many devices `devices="auto"` takes: all there are, and one on the CPU."""
        return hpu.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether a device stands for "hpu"."""
        return hpu.is_available()

    @staticmethod
    def name() -> str:
        """What Lightning calls it by."""
        return "hpu"

    @staticmethod
    def get_device_name() -> str:
        """The name of the device that stands for "hpu"."""
        return str(hpu.get_device_name())

    @staticmethod
    def is_lazy() -> bool:
        """False: ops run when they are called."""
        return False
