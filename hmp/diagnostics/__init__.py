"""Answers about policies, list files, references that hmp cannot replace, and a device's memory. Nothing here patches torch."""

from ..wrapping import fallbacks
from . import check_lists
from .devices import check_there, device_of
from .explanation import Rule, explain
from .memory_statistics import memory_stats, of_allocator
from .unreachable_names import Unreachable, tell_unreachable, unreachable

__all__ = [
    "Rule",
    "Unreachable",
    "check_lists",
    "check_there",
    "device_of",
    "explain",
    "fallbacks",
    "memory_stats",
    "of_allocator",
    "tell_unreachable",
    "unreachable",
]
