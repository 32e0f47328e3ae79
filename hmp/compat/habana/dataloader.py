"""`habana_dataloader`: torch's DataLoader and torchvision's ImageFolder, in the place of those that decode on Gaudi."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch.utils.data

from .device_map import mapped
from .nothing import refuses

__all__ = ["HabanaDataLoader", "fetch_habana_unet_loader"]

fetch_habana_unet_loader = refuses("fetch_habana_unet_loader", "use the script's loader for other devices, or torch's DataLoader")


class HabanaDataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("pin_memory_device", "")
        device = mapped(given)
        if device is not given:
            del kwargs["pin_memory_device"]  # torch pins for its own accelerator; what is on the CPU needs no pages pinned to get there
            if device.type == "cpu":
                kwargs.pop("pin_memory", None)
        super().__init__(*args, **kwargs)


@functools.cache
def _image_folder() -> type:
    try:
        ImageFolder = importlib.import_module("torchvision.datasets").ImageFolder
    except ImportError as error:
        raise ImportError(f"ImageFolderWithManifest is torchvision's ImageFolder here: pip install torchvision ({error})") from error
    return type("ImageFolderWithManifest", (ImageFolder,), {"__doc__": ImageFolder.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "ImageFolderWithManifest":  # torchvision is imported when a program asks for it
        return _image_folder()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
