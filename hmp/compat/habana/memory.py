"""The memory statistics of torch.hpu, under Habana's names, of the device that stands for "hpu".

On the CPU they are the process's: what it holds in memory and what it held at most.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .standing import module, standing

__all__ = [
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
]

# Habana's name → torch.cuda.memory_stats()'s
_COUNTS = {
    "InUse": "allocated_bytes.all.current",
    "MaxInUse": "allocated_bytes.all.peak",
    "NumAllocs": "allocation.all.allocated",
    "NumFrees": "allocation.all.freed",
    "ActiveAllocs": "active.all.current",
    "TotalSystemAllocs": "segment.all.allocated",
    "TotalSystemFrees": "segment.all.freed",
    "TotalActiveAllocs": "segment.all.current",
}


def memory_stats(device: Any = None) -> dict[str, int]:
    """Limit, InUse and MaxInUse in bytes, and counts of allocations, which are 0 where they are not counted (on the CPU all are)."""
    here = standing(device)
    stats = dict.fromkeys(("Limit", *_COUNTS, "MaxAllocSize"), 0)
    if here.type == "cpu":
        return {**stats, **_of_process()}
    counted = module().memory_stats(here)
    stats |= {name: int(counted.get(theirs, 0)) for name, theirs in _COUNTS.items()}
    stats["Limit"] = int(module().mem_get_info(here)[1])
    return stats


def memory_allocated(device: Any = None) -> int:
    """Bytes in use."""
    return memory_stats(device)["InUse"]


def max_memory_allocated(device: Any = None) -> int:
    """Bytes in use at most."""
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the system."""
    here = standing(device)
    return memory_allocated(device) if here.type == "cpu" else int(module().memory_reserved(here))


def max_memory_reserved(device: Any = None) -> int:
    """Bytes taken from the system at most."""
    here = standing(device)
    return max_memory_allocated(device) if here.type == "cpu" else int(module().max_memory_reserved(here))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The statistics as text, one a line."""
    stats = memory_stats(device)
    width = max(map(len, stats))
    return "\n".join(f"{name:{width}}  {value:>20,}" for name, value in stats.items())


def reset_peak_memory_stats(device: Any = None) -> None:
    """Has MaxInUse start anew. On the CPU Linux can do that; elsewhere it stays."""
    here = standing(device)
    if here.type != "cpu":
        module().reset_peak_memory_stats(here)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Has the counts start anew."""
    here = standing(device)
    if here.type != "cpu":
        module().reset_accumulated_memory_stats(here)


def _of_process() -> dict[str, int]:
    if sys.platform == "win32":
        return {}
    import resource  # not on Windows

    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sys.platform == "linux":
        held = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        # in kibibytes, and the peak is noted now and then: it may lag behind
        in_use, peak = (int(held[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return {"Limit": limit, "InUse": in_use, "MaxInUse": max(in_use, peak)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"Limit": limit, "InUse": peak, "MaxInUse": peak}
