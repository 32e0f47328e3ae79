"""`torch.hpu` and `habana_frameworks.torch.hpu`: the device that "hpu" is mapped to, under Habana's names."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from . import graphs, memory, random, streams
from .device_map import actual_device, device_module, forwarded, of_device, target
from .graphs import *  # noqa: F403  # torch.hpu has the names of its modules
from .memory import *  # noqa: F403
from .no_ops import no_op
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

sdp_kernel = no_op("sdp_kernel", "it chooses among Gaudi's attention kernels", lambda *args, **kwargs: contextlib.nullcontext())


def is_available() -> bool:
    """Return True if "hpu" is mapped to a device."""
    return target() is not None


def device_count() -> int:
    """Return the number of devices: 0 without a map; 1 for the CPU, or a map to a device with an index; else all of the type."""
    here = target()
    if here is None:
        return 0
    count: int = 1 if here.type == "cpu" or here.index is not None else device_module().device_count()
    return count


def current_device() -> int:
    """Return the index of the current device among those that "hpu" is mapped to."""
    here = actual_device()
    index: int = 0 if here.type == "cpu" or here.index is not None else device_module().current_device()
    return index


set_device = of_device("set_device", lambda: None, "Make a device the current one. The CPU is always current.")


class device(contextlib.ContextDecorator):
    """A context in which a device is the current one.

    Args:
        device: An index, "hpu", "hpu:1" or a torch.device.

    Raises:
        HmpError: "hpu" is not mapped to a device.

    Example:
        >>> with hmp.compat.habana.install("cpu"), torch.hpu.device(0):
        ...     torch.hpu.current_device()
        0
    """

    def __init__(self, device: Any) -> None:
        self._device = actual_device(device)
        self._before: Any = None

    def __enter__(self) -> None:
        if self._device.type != "cpu":
            self._before = device_module().current_device()
            device_module().set_device(self._device)

    def __exit__(self, *exc_info: object) -> None:
        if self._device.type != "cpu":
            device_module().set_device(self._before)


def _no_properties() -> Any:
    raise RuntimeError(
        'torch.hpu.get_device_properties(): expected "hpu" to be an accelerator, got the CPU; use torch.hpu.get_device_name()'
    )


synchronize = of_device("synchronize", lambda: None, "Wait until all work on the device is done.")
empty_cache = forwarded("empty_cache", lambda: None, "Release unused memory of the device's allocator.")
get_device_name = of_device("get_device_name", lambda: "cpu", 'Return the device\'s name: "cpu", or its product name.')
get_device_properties = of_device(
    "get_device_properties", _no_properties, "Return the properties that torch has of the device; the CPU raises RuntimeError."
)
get_device_capability = of_device("get_device_capability", lambda: "", 'Return the compute capability of the device; "" for the CPU.')


def is_bf16_supported() -> bool:
    """Return True if the device computes in bfloat16."""
    return actual_device().type != "cuda" or bool(device_module().is_bf16_supported())


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of torch.autocast: bfloat16 and float16."""
    return [torch.bfloat16, torch.float16]


def is_autocast_hpu_enabled() -> bool:
    """Return True if torch.autocast is enabled for the device, or hmp casts."""
    return torch.is_autocast_enabled(actual_device().type)


def get_autocast_hpu_dtype() -> torch.dtype:
    """Return the dtype of torch.autocast for the device."""
    return torch.get_autocast_dtype(actual_device().type)


def init() -> None:
    """Do nothing: the device initialises itself."""


def is_initialized() -> bool:
    """Return True if "hpu" is mapped to a device."""
    return is_available()


# torch calls these two
def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


class autocast(torch.autocast):
    """`torch.hpu.amp.autocast`: `torch.autocast("hpu")`, in bfloat16 by default."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        super().__init__("hpu", dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.hpu.amp.GradScaler`: torch.amp.GradScaler for the device that "hpu" is mapped to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(actual_device().type, *args, **kwargs)
