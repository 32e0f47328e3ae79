"""`habana_frameworks.torch.gpu_migration`: "cuda" is the device that "hpu" is mapped to, so that scripts for GPUs run without one.

As on a Gaudi, torch.cuda has what torch.hpu has, and torch.autocast("cuda") computes in bfloat16 unless it is given a dtype. Other names of
torch.cuda stay torch's own, and raise its errors.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from . import device_arguments, hpu, memory, streams
from .backends import on_mapped_device
from .device_map import actual_device, map_cuda, of_device
from .replacements import IN_PLACE


def _properties() -> types.SimpleNamespace:
    return types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=memory.mem_get_info()[1], multi_processor_count=os.cpu_count())


# What torch.cuda has besides the names of torch.hpu, or with other arguments.
_NAMES: dict[str, Any] = {
    "CUDAGraph": hpu.HPUGraph,
    "get_device_capability": of_device("get_device_capability", lambda: (0, 0), "Return the compute capability; (0, 0) for the CPU."),
    "get_device_properties": of_device("get_device_properties", _properties, "Return the name and the memory of the device."),
    "is_bf16_supported": lambda including_emulation=True: hpu.is_bf16_supported(),
}


def migrate() -> None:
    """Map "cuda" as "hpu" is, until the shim is uninstalled. Importing Habana's module calls this. Where "hpu" is CUDA, do nothing."""
    device = actual_device()
    if device.type == "cuda":
        return
    has_cuda = torch.cuda.is_available()
    map_cuda(True)
    IN_PLACE.on_undo(functools.partial(map_cuda, False))
    device_arguments.install_cuda(IN_PLACE)
    shared = {name: getattr(hpu, name) for name in hpu.__all__ if name[0] != "_" and hasattr(torch.cuda, name)}
    for name, value in {**shared, **_NAMES, **streams.classes()}.items():
        IN_PLACE.put(
            torch.cuda, name, value if isinstance(value, type) else _for_programs(getattr(torch.cuda, name), value, "torch", "hmp")
        )
    if not has_cuda:  # else torch would call this in place of its own once, and believe that CUDA is initialised
        IN_PLACE.put(torch.cuda, "_lazy_init", _for_programs(torch.cuda._lazy_init, hpu._lazy_init, "torch.cuda"))
    for name in ("autocast", "GradScaler"):
        IN_PLACE.put(torch.cuda.amp, name, getattr(hpu, name))
    if device.type == "cpu" and torch.distributed.is_available():
        _install_parallel()


def _for_programs(original: Callable[..., Any], migrated: Callable[..., Any], *packages: str) -> Callable[..., Any]:
    """Return the function that programs call instead of `original`. The code of the packages calls `original`: it means CUDA itself."""
    own = tuple(f"{package}." for package in packages)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = f"{sys._getframe(1).f_globals.get('__name__')}."
        return (original if caller.startswith(own) else migrated)(*args, **kwargs)

    return call


def _install_parallel() -> None:
    """Have processes that use NCCL use Gloo, and DDP that is given devices compute where the model is: on the CPU."""
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        for name in ("init_process_group", "new_group"):
            IN_PLACE.put(module, name, _over_gloo(on_mapped_device(getattr(module, name))))
    IN_PLACE.put(DistributedDataParallel, "__init__", _without_devices(DistributedDataParallel.__init__))


def _over_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = kwargs["backend"].replace("nccl", "gloo")
        if args and isinstance(args[0], str):
            args = (args[0].replace("nccl", "gloo"), *args[1:])
        return original(*args, **kwargs)

    return start


def _without_devices(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, module, None, None, *args, **kwargs)

    return init
