"""The device that stands for "hpu" in the calls of torch.hpu, and torch's module for it."""

from __future__ import annotations

from typing import Any

import torch

from ... import HmpError
from .device_map import SOURCE, mapped, target


def standing(device: Any = None) -> torch.device:
    """The device that stands for `device`: an index, "hpu", "hpu:1", or None for the current one. HmpError where nothing does."""
    if target() is None:
        raise HmpError('nothing stands for the device "hpu" here; give hmp.compat.habana.install() a device_map, such as "cpu"')
    if isinstance(device, int):
        device = torch.device(SOURCE, device)
    here = mapped(torch.device(SOURCE if device is None else device))
    assert isinstance(here, torch.device)
    return here


def module() -> Any:
    """torch.cuda, torch.cpu, ...: the module of the device that stands for "hpu"."""
    return torch.get_device_module(standing())
