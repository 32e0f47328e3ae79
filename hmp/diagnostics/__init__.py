"""Answers about policies, list files, references that hmp cannot replace, and a device's memory. Nothing here patches torch."""

from ..wrapping import fallbacks, fallbacks_of, replaces_autocast
from . import check_lists, overriding
from .devices import check_there, device_of
from .explanation import Rule, explain
from .memory_statistics import memory_stats, of_allocator
from .overriding import Overrider
from .unreachable_names import Unreachable, tell_unreachable, unreachable

__all__ = [
    "Overrider",
    "Rule",
    "Unreachable",
    "check_lists",
    "check_there",
    "device_of",
    "explain",
    "fallbacks",
    "fallbacks_of",
    "memory_stats",
    "of_allocator",
    "overriding",
    "replaces_autocast",
    "tell_unreachable",
    "unreachable",
]
