"""The device map: which device "hpu" is, and "cuda" after GPU migration; parsed from the user's argument and applied in calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ... import HmpError

SOURCE = "hpu"
_FORMS = "expected hpu=cpu, hpu=cuda, hpu=cuda:1, hpu=auto or the like"

_target: torch.device | None = None
# The types of devices that are mapped.
_sources = {SOURCE}


def set_target(device: torch.device | None) -> None:
    """Map "hpu" to `device` from now on; None maps nothing."""
    global _target
    _target = device


def map_cuda(is_mapped: bool) -> None:
    """Map "cuda" as "hpu" from now on, or no longer."""
    (_sources.add if is_mapped else _sources.discard)("cuda")


def target() -> torch.device | None:
    """Return the device that "hpu" is mapped to, or None."""
    return _target


def parse(wanted: str | Mapping[str, str] | None) -> torch.device | None:
    """Return the device of a device map: "cpu", "hpu=cpu", {"hpu": "cpu"} or "auto". Raise HmpError for others."""
    if wanted is None:
        return None
    if isinstance(wanted, Mapping):
        wanted = ",".join(f"{source}={name}" for source, name in wanted.items())
    if not isinstance(wanted, str):
        raise HmpError(f"device map {wanted!r}: expected a string or a dict, got {type(wanted).__name__}; {_FORMS}")
    source, equals, name = wanted.rpartition("=")
    if equals and source != SOURCE:
        raise HmpError(f"device map {wanted!r}: only {SOURCE!r} can be mapped, got {source!r}; {_FORMS}")
    return _automatic() if name == "auto" else _existing(wanted, name)


def _automatic() -> torch.device:
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None and found.type != SOURCE:
            return torch.device(found.type)
    return torch.device("cpu")


def _existing(wanted: str, name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HmpError(f"device map {wanted!r}: torch has no device {name!r}; {_FORMS}") from None
    module = getattr(torch, device.type, None)
    is_available = getattr(module, "is_available", None)
    if device.type in _sources or is_available is None or not is_available():
        raise HmpError(f"device map {wanted!r}: this machine has no {device.type!r}; {_FORMS}")
    count: int = getattr(module, "device_count", lambda: 1)()
    if device.index is not None and device.index >= count:
        raise HmpError(f"device map {wanted!r}: this machine has {count} {device.type!r} devices, numbered from 0; {_FORMS}")
    return device


def mapped(device: Any) -> Any:
    """Return the device that an "hpu" is mapped to, given as a string or torch.device, and any other value as it is.

    "hpu:1" becomes the device of that index. A map to the CPU, or to a device with an index, has this one device only. After GPU migration
    the same holds for "cuda", and for an index alone, which is CUDA's.
    """
    if type(device) is int and "cuda" in _sources:
        device = torch.device("cuda", device)
    kind = device.type if type(device) is torch.device else device.partition(":")[0] if isinstance(device, str) else None
    if kind not in _sources:
        return device
    if _target is None:
        return device
    index = torch.device(device).index
    if index is None or _target.index is not None or _target.type == "cpu":
        return _target
    return torch.device(_target.type, index)


def actual_device(device: Any = None) -> torch.device:
    """Return the device that "hpu", "hpu:1", an index, or None for the current device, is mapped to. Raise HmpError without a map."""
    if _target is None:
        raise HmpError('expected a device map for "hpu", got none; call hmp.compat.habana.install(device_map="cpu")')
    if isinstance(device, int):
        device = torch.device(SOURCE, device)
    here = mapped(torch.device(SOURCE if device is None else device))
    assert isinstance(here, torch.device)
    return here


def device_module() -> Any:
    """Return torch.cuda, torch.cpu, ...: the module of the device that "hpu" is mapped to."""
    return torch.get_device_module(actual_device())


def forwarded(name: str, on_cpu: Callable[..., Any], doc: str) -> Any:
    """Return the function `name` of torch.hpu, which calls that of the mapped device's module, or `on_cpu` on the CPU."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return on_cpu(*args, **kwargs) if actual_device().type == "cpu" else getattr(device_module(), name)(*args, **kwargs)

    return named(function, name, doc)


def of_device(name: str, on_cpu: Callable[[], Any], doc: str) -> Any:
    """Return the same for a function that takes a device, by default the current one. `on_cpu` takes no arguments."""

    def function(device: Any = None) -> Any:
        here = actual_device(device)
        return on_cpu() if here.type == "cpu" else getattr(device_module(), name)(here)

    return named(function, name, doc)


def named(function: Any, name: str, doc: str) -> Any:
    """Set the function's name and docstring and return it."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function
