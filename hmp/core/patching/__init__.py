"""Reversible patches of torch: functions are put in the places of torch's own, and torch's own put back. Knows nothing of casts."""

from . import patches, references
from .patched_op import PatchedMethod, PatchedOp, unpatched_op
from .references import SKIPPED, instances, subclasses, unfrozen

__all__ = [
    "SKIPPED",
    "PatchedMethod",
    "PatchedOp",
    "instances",
    "patches",
    "references",
    "subclasses",
    "unfrozen",
    "unpatched_op",
]
