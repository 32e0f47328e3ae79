"""`optimum.habana.utils`: the memory of the device that stands for "hpu", in gigabytes, and the seed of everything."""

from __future__ import annotations

from transformers import set_seed as seed_everything

from ..habana.memory import memory_stats


def get_hpu_memory_stats() -> dict[str, float]:
    """What is in use, what was at most, and what there is, each with its unit in its name; of a CPU, the process's and the machine's."""
    stats = memory_stats()
    names = {"memory_allocated (GB)": "InUse", "max_memory_allocated (GB)": "MaxInUse", "total_memory_available (GB)": "Limit"}
    return {name: round(stats[key] / 2**30, 2) for name, key in names.items()}


def set_seed(seed: int) -> None:
    """Seeds Python's generator, NumPy's and torch's on every device."""
    seed_everything(seed)
