"""The device that "hpu" stands for: read from what the user gave, and put in the place of "hpu" in calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ... import HmpError

SOURCE = "hpu"
_FORMS = "give hpu=cpu, hpu=cuda, hpu=cuda:1 or hpu=auto"

_target: torch.device | None = None


def set_target(device: torch.device | None) -> None:
    """Maps "hpu" to `device` from now on; None maps nothing."""
    global _target
    _target = device


def target() -> torch.device | None:
    """The device that "hpu" stands for now."""
    return _target


def parse(wanted: str | Mapping[str, str] | None) -> torch.device | None:
    """The device that a device map names: "cpu", "hpu=cpu", {"hpu": "cpu"}, "auto". HmpError where it cannot be used."""
    if wanted is None:
        return None
    if isinstance(wanted, Mapping):
        wanted = ",".join(f"{source}={name}" for source, name in wanted.items())
    if not isinstance(wanted, str):
        raise HmpError(f"device map {wanted!r} is of type {type(wanted).__name__}; {_FORMS}")
    source, equals, name = wanted.rpartition("=")
    if equals and source != SOURCE:
        raise HmpError(f"device map {wanted!r}: {source!r} is not mapped, only {SOURCE!r} is; {_FORMS}")
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
        raise HmpError(f"device map {wanted!r}: {name!r} is no torch device; {_FORMS}") from None
    module = getattr(torch, device.type, None)
    is_available = getattr(module, "is_available", None)
    if device.type == SOURCE or is_available is None or not is_available():
        raise HmpError(f"device map {wanted!r}: there is no {device.type!r} on this machine; {_FORMS}")
    count: int = getattr(module, "device_count", lambda: 1)()
    if device.index is not None and device.index >= count:
        raise HmpError(f"device map {wanted!r}: there are {count} {device.type!r} devices, counted from 0; {_FORMS}")
    return device


def mapped(device: Any) -> Any:
    """`device`, or what stands for it where it is an "hpu" (a string or a torch.device); anything else is given back as it is.

    "hpu:1" becomes the device of that index; of a map that names an index, and of the CPU, there is only the one.
    """
    if type(device) is torch.device:
        if device.type != SOURCE:
            return device
    elif not isinstance(device, str) or not (device == SOURCE or device.startswith("hpu:")):
        return device
    if _target is None:
        return device
    index = torch.device(device).index
    if index is None or _target.index is not None or _target.type == "cpu":
        return _target
    return torch.device(_target.type, index)


def standing(device: Any = None) -> torch.device:
    """The device that stands for `device`: an index, "hpu", "hpu:1", or None for the current one. HmpError where nothing does."""
    if _target is None:
        raise HmpError('nothing stands for the device "hpu" here; give hmp.compat.habana.install() a device_map, such as "cpu"')
    if isinstance(device, int):
        device = torch.device(SOURCE, device)
    here = mapped(torch.device(SOURCE if device is None else device))
    assert isinstance(here, torch.device)
    return here


def module() -> Any:
    """torch.cuda, torch.cpu, ...: the module of the device that stands for "hpu"."""
    return torch.get_device_module(standing())


def forwarded(name: str, on_cpu: Callable[..., Any], doc: str) -> Any:
    """The function `name` of torch.hpu: that of the module of the device that stands for "hpu", `on_cpu` where that is the CPU."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return on_cpu(*args, **kwargs) if standing().type == "cpu" else getattr(module(), name)(*args, **kwargs)

    return named(function, name, doc)


def of_device(name: str, on_cpu: Callable[[], Any], doc: str) -> Any:
    """The same of a function that takes a device, the current one where none is given; `on_cpu` takes nothing."""

    def function(device: Any = None) -> Any:
        here = standing(device)
        return on_cpu() if here.type == "cpu" else getattr(module(), name)(here)

    return named(function, name, doc)


def named(function: Any, name: str, doc: str) -> Any:
    """`function`, which has that name and that docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function
