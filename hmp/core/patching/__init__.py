"""Reversible patches of torch: functions are put in the places of torch's own, and torch's own put back. Knows nothing of casts."""

from . import cache, holders, patches, references
from .heap import alone, subclasses, unfrozen
from .patched_op import PatchedMethod, PatchedOp, unpatched_op
from .references import SKIPPED

__all__ = [
    "SKIPPED",
    "PatchedMethod",
    "PatchedOp",
    "alone",
    "cache",
    "holders",
    "patches",
    "references",
    "subclasses",
    "unfrozen",
    "unpatched_op",
]
