"""`torch.hpu` and `habana_frameworks.torch.hpu`: the device that stands for "hpu", asked in Habana's words."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from . import graphs, memory, random, streams
from .device_map import forwarded, module, of_device, standing, target
from .graphs import *  # noqa: F403  # torch.hpu has the names of its modules
from .memory import *  # noqa: F403
from .nothing import does_nothing
from .random import *  # noqa: F403
from .streams import *  # noqa: F403

__all__ = [
    "_is_in_bad_fork",
    "_lazy_init",
    "current_device",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_autocast_hpu_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "is_autocast_hpu_enabled",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "sdp_kernel",
    "set_device",
    "synchronize",
]
__all__ += graphs.__all__ + memory.__all__ + random.__all__ + streams.__all__

sdp_kernel = does_nothing("sdp_kernel", "it chooses among Gaudi's attention kernels", lambda *args, **kwargs: contextlib.nullcontext())


def is_available() -> bool:
    """Whether a device stands for "hpu"."""
    return target() is not None


def device_count() -> int:
    """How many devices stand for "hpu": one, if it is the CPU or if the device map names an index; none without a map."""
    here = target()
    if here is None:
        return 0
    count: int = 1 if here.type == "cpu" or here.index is not None else module().device_count()
    return count


def current_device() -> int:
    """The index of the current device, counted among those that stand for "hpu"."""
    here = standing()
    index: int = 0 if here.type == "cpu" or here.index is not None else module().current_device()
    return index


set_device = of_device("set_device", lambda: None, "Makes a device the current one; of the CPU there is only one.")


class device(contextlib.ContextDecorator):
    """A region in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._device = standing(device)
        self._before: Any = None

    def __enter__(self) -> None:
        if self._device.type != "cpu":
            self._before = module().current_device()
            module().set_device(self._device)

    def __exit__(self, *exc_info: object) -> None:
        if self._device.type != "cpu":
            module().set_device(self._before)


def _no_properties() -> Any:
    raise RuntimeError('"hpu" is the CPU here, which has no device properties; ask torch.hpu.get_device_name()')


synchronize = of_device("synchronize", lambda: None, "Waits until everything that was started on the device is done.")
empty_cache = forwarded("empty_cache", lambda: None, "Gives memory that is held for later back to the device.")
get_device_name = of_device(
    "get_device_name", lambda: "cpu", 'The name of the device that stands for "hpu", such as "cpu" or its product name.'
)
get_device_properties = of_device(
    "get_device_properties", _no_properties, "What torch knows of the device; of the CPU nothing, which raises."
)
get_device_capability = of_device("get_device_capability", lambda: "", "The capability of the device; of the CPU the empty string.")


def is_bf16_supported() -> bool:
    """Whether the device computes in bfloat16."""
    return standing().type != "cuda" or bool(module().is_bf16_supported())


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that torch.autocast takes."""
    return [torch.bfloat16, torch.float16]


def is_autocast_hpu_enabled() -> bool:
    """Whether torch.autocast is enabled for the device that stands for "hpu", or hmp casts."""
    return torch.is_autocast_enabled(standing().type)


def get_autocast_hpu_dtype() -> torch.dtype:
    """The dtype of torch.autocast for that device."""
    return torch.get_autocast_dtype(standing().type)


def init() -> None:
    """Nothing: the device that stands for "hpu" initialises itself."""


def is_initialized() -> bool:
    """Whether a device stands for "hpu"."""
    return is_available()


# torch calls these two
def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False
