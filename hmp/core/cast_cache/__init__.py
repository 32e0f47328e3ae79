"""Caches of casts: a low-precision copy of a tensor is used again while nobody has written to that tensor (R18)."""

from . import cast_cache, mark_proof, shared_cast, weight_cache, write_marks
from .cast_cache import cache_info, clear_cache, set_cache_limit, set_sharing
from .shared_cast import hits_here

__all__ = [
    "cache_info",
    "cast_cache",
    "clear_cache",
    "hits_here",
    "mark_proof",
    "set_cache_limit",
    "set_sharing",
    "shared_cast",
    "weight_cache",
    "write_marks",
]
