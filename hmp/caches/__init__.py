"""Casts that are made once and used again, for as long as nobody has written what was cast."""

from . import cast_cache, weight_cache, write_marks
from .cast_cache import cache_info, clear_cache, hits, set_cache_limit

__all__ = [
    "cache_info",
    "cast_cache",
    "clear_cache",
    "hits",
    "set_cache_limit",
    "weight_cache",
    "write_marks",
]
