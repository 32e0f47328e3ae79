"""Answers about policies, list files and a device's memory. Nothing here patches torch."""

from ...core.rules import fallbacks, fallbacks_of, replaces_autocast
from . import check_lists, overriding
from .devices import check_there, device_of
from .explanation import Rule, explain
from .memory_statistics import memory_stats, of_allocator
from .overriding import Overrider

__all__ = [
    "Overrider",
    "Rule",
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
]
