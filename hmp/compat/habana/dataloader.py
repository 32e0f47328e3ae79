"""`habana_dataloader`: torch's DataLoader and torchvision's ImageFolder replace decoding on Gaudi."""

from __future__ import annotations

import importlib
from typing import Any

import torch.utils.data

from .device_map import mapped

__all__ = ["HabanaDataLoader"]


class HabanaDataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader.

    Args:
        *args: Those of torch's DataLoader.
        **kwargs: Those of torch's DataLoader. `pin_memory_device="hpu"` pins for the device that "hpu" is mapped to; for the CPU it pins
            nothing.

    Example:
        >>> loader = HabanaDataLoader(torch.arange(4), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("pin_memory_device", "")
        device = mapped(given)
        if device is not given:
            del kwargs["pin_memory_device"]  # torch pins for its accelerator
            if device.type == "cpu":
                kwargs.pop("pin_memory", None)
        super().__init__(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name != "ImageFolderWithManifest":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:  # here: torchvision need not be installed
        return importlib.import_module("torchvision.datasets").ImageFolder
    except ImportError as error:
        raise ImportError(f"ImageFolderWithManifest needs torchvision, which does not import ({error}); pip install torchvision") from error
