"""The memory statistics of torch.hpu, under Habana's names, of the device that stands for "hpu".

On the CPU they are the process's: what it holds in memory and what it held at most.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hmp

from ...tools.diagnostics import of_allocator
from .device_map import module, of_device, standing

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
    """Limit, InUse and MaxInUse in bytes, and counts of allocations, which are 0 where they are not counted (on the CPU all are)."""
    here = standing(device)
    said = hmp.memory_stats(here) if here.type == "cpu" else of_allocator(module().memory_stats(here), module().mem_get_info(here)[1])
    stats = {name: value or 0 for name, value in said.items()}
    stats["MaxInUse"] = max(stats["InUse"], stats["MaxInUse"])  # a process's peak is noted now and then: it may lag behind
    return stats


def memory_allocated(device: Any = None) -> int:
    """Bytes in use."""
    return memory_stats(device)["InUse"]


def max_memory_allocated(device: Any = None) -> int:
    """Bytes in use at most."""
    return memory_stats(device)["MaxInUse"]


memory_reserved = of_device("memory_reserved", memory_allocated, "Bytes taken from the system.")
max_memory_reserved = of_device("max_memory_reserved", max_memory_allocated, "Bytes taken from the system at most.")


def _free_and_all() -> tuple[int, int]:
    stats = memory_stats()
    return stats["Limit"] - stats["InUse"], stats["Limit"]


mem_get_info = of_device(
    "mem_get_info", _free_and_all, "Bytes that are free, and bytes that there are; on the CPU free is what the process does not hold."
)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The statistics as text, one a line."""
    stats = memory_stats(device)
    width = max(map(len, stats))
    return "\n".join(f"{name:{width}}  {value:>20,}" for name, value in stats.items())


def _reset_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


reset_peak_memory_stats = of_device(
    "reset_peak_memory_stats", _reset_peak, "Has MaxInUse start anew. On the CPU Linux can do that; elsewhere it stays."
)
reset_max_memory_allocated = reset_peak_memory_stats
reset_accumulated_memory_stats = of_device("reset_accumulated_memory_stats", lambda: None, "Has the counts start anew.")
