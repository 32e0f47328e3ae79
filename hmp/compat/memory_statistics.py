"""Statistics of a device's memory under the names that Habana's memory_stats() uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import HmpError
from ..tools.benchmark import device_of

NAMES = (
    "Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees", "ActiveAllocs", "MaxAllocSize",
    "TotalSystemAllocs", "TotalSystemFrees", "TotalActiveAllocs",
)  # fmt: skip
GIGABYTE = 1 << 30  # bytes, as Optimum counts them

Stats = dict[str, int | None]

# Habana's name → the key of torch.cuda.memory_stats(). MaxAllocSize is missing: torch's allocator does not record it. ActiveAllocs counts
# what is allocated and not yet freed; TotalActiveAllocs does so for allocations from the system.
_CUDA = {
    "InUse": "allocated_bytes.all.current",
    "MaxInUse": "allocated_bytes.all.peak",
    "NumAllocs": "allocation.all.allocated",
    "NumFrees": "allocation.all.freed",
    "ActiveAllocs": "active.all.current",
    "TotalSystemAllocs": "segment.all.allocated",  # a segment is one cudaMalloc
    "TotalSystemFrees": "segment.all.freed",
    "TotalActiveAllocs": "segment.all.current",
}

_STATUS = Path("/proc/self/status")


def memory_stats(device: torch.device | str | int) -> Stats:
    """Return Habana's ten statistics of a device's memory; None for those that the device does not report.

    Limit, InUse, MaxInUse and MaxAllocSize are in bytes; NumAllocs, NumFrees, ActiveAllocs, TotalSystemAllocs, TotalSystemFrees and
    TotalActiveAllocs are counts. For "cuda" and "xpu" they are those of torch's caching allocator, for "hpu" Habana's own; for "cpu" Limit
    is the machine's memory, InUse and MaxInUse are on Linux the resident memory of this process and its peak, and the others are None.

    Args:
        device: The device, such as "cpu" or "cuda:0".

    Returns:
        The statistics by name.

    Raises:
        HmpError: The argument isn't a device, or is an HPU that this machine lacks.

    Example:
        >>> len(hmp.memory.memory_stats("cpu"))
        10
    """
    device = device_of(device, "memory_stats(): ")
    if device.type == "cpu":
        return _from_os()
    # on Gaudi: torch.hpu.memory_stats(device) has the ten statistics under these names, in bytes and counts.
    if device.type == "hpu":
        hpu: Any = getattr(torch, "hpu", None)
        if not hasattr(hpu, "memory_stats"):
            raise HmpError(
                f"memory_stats({str(device)!r}): this torch has no torch.hpu; import habana_frameworks.torch first, or ask for 'cpu'"
            )
        return _named(hpu.memory_stats(device))
    module: Any = getattr(torch, device.type, None)  # it reports all of its allocator, or the bytes in use alone; nothing for "meta"
    if hasattr(module, "memory_stats"):
        return of_allocator(module.memory_stats(device), module.get_device_properties(device).total_memory)
    told = {"InUse": "memory_allocated", "MaxInUse": "max_memory_allocated"}
    return _named({name: getattr(module, asked)(device) for name, asked in told.items() if hasattr(module, asked)})


def in_gigabytes(stats: Mapping[str, int | None]) -> dict[str, float | None]:
    """Return Optimum's three numbers of Habana's statistics."""
    names = {"memory_allocated": "InUse", "max_memory_allocated": "MaxInUse", "total_memory_available": "Limit"}
    sizes = {name: stats[key] for name, key in names.items()}
    return {name: None if size is None else round(size / GIGABYTE, 2) for name, size in sizes.items()}


def _named(found: Mapping[str, Any]) -> Stats:
    return {name: None if found.get(name) is None else int(found[name]) for name in NAMES}


def of_allocator(found: Mapping[str, Any], limit: int) -> Stats:
    """Habana's ten statistics of a device with `limit` bytes of memory, from `found`, the result of torch.cuda.memory_stats()."""
    return _named({"Limit": limit, **{name: found.get(key) for name, key in _CUDA.items()}})


def _from_os() -> Stats:
    found: dict[str, int] = {}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["Limit"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _STATUS.is_file():
        # both from this file: the peak of getrusage() includes that of the parent process before the fork
        sizes = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        found |= {name: int(sizes[key].split()[0]) * 1024 for name, key in (("InUse", "VmRSS"), ("MaxInUse", "VmHWM")) if key in sizes}
    return _named(found)
