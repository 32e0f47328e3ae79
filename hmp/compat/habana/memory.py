"""The memory statistics of torch.hpu, under Habana's names. On the CPU they are those of the process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hmp

from .device_map import actual_device, of_device

__all__ = [
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
]


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return Limit, InUse and MaxInUse in bytes, and counts of allocations, which are 0 if the device does not count them (the CPU)."""
    stats = {name: value or 0 for name, value in hmp.memory.memory_stats(actual_device(device)).items()}
    stats["MaxInUse"] = max(stats["InUse"], stats["MaxInUse"])  # the system updates a process's peak with a delay
    return stats


def memory_allocated(device: Any = None) -> int:
    """Return the bytes in use."""
    return memory_stats(device)["InUse"]


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that were in use."""
    return memory_stats(device)["MaxInUse"]


memory_reserved = of_device("memory_reserved", memory_allocated, "Return the bytes reserved from the system.")
max_memory_reserved = of_device("max_memory_reserved", max_memory_allocated, "Return the most bytes that were reserved from the system.")


def _free_and_total() -> tuple[int, int]:
    stats = memory_stats()
    return stats["Limit"] - stats["InUse"], stats["Limit"]


mem_get_info = of_device(
    "mem_get_info", _free_and_total, "Return the free and the total bytes. On the CPU all that the process does not use is free."
)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return the statistics as text, one a line."""
    stats = memory_stats(device)
    width = max(map(len, stats))
    return "\n".join(f"{name:{width}}  {value:>20,}" for name, value in stats.items())


def _reset_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


reset_peak_memory_stats = of_device(
    "reset_peak_memory_stats", _reset_peak, "Reset MaxInUse to what is in use. For the CPU only Linux can do this."
)
reset_max_memory_allocated = reset_peak_memory_stats
reset_accumulated_memory_stats = of_device("reset_accumulated_memory_stats", lambda: None, "Reset the counts.")
