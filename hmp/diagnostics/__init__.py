"""Answers about policies, list files, references that hmp cannot replace, and a device's memory. Nothing here patches torch."""

from ..wrapping import fallbacks
from . import check_lists
from .explanation import Rule, explain
from .memory_statistics import memory_stats, of_allocator
from .unreachable_names import Unreachable, tell_unreachable, unreachable

__all__ = [
    "Rule",
    "Unreachable",
    "check_lists",
    "explain",
    "fallbacks",
    "memory_stats",
    "of_allocator",
    "tell_unreachable",
    "unreachable",
]
