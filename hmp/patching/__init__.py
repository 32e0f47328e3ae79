"""Reversible patches of torch: functions are put in the places of torch's own, and torch's own put back. Knows nothing of casts."""

from . import cache, holders, patches, references, stand_ins
from .heap import alone, subclasses, unfrozen
from .references import SKIPPED
from .stand_ins import ComparisonCounterpart, Counterpart, MethodCounterpart, compares, is_dispatcher, stands_in

__all__ = [
    "SKIPPED",
    "ComparisonCounterpart",
    "Counterpart",
    "MethodCounterpart",
    "alone",
    "cache",
    "compares",
    "holders",
    "is_dispatcher",
    "patches",
    "references",
    "stand_ins",
    "stands_in",
    "subclasses",
    "unfrozen",
]
