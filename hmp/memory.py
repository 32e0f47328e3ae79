"""Memory: statistics of a device, and the low-precision copies of weights."""

from .compat.memory_statistics import memory_stats as memory_stats
from .core.copies import clear_cache as clear_cache

__all__ = ["clear_cache", "memory_stats"]
