"""What ops save for backward, packed into few bits until backward asks for it."""

from .copies import noting
from .formats import FORMATS
from .hooks import can_count, check_torch, counting, keeping
from .packable import KEEPS, packing_of, why_never
from .saved_tensors import refuse_written, watchers

__all__ = [
    "FORMATS",
    "KEEPS",
    "can_count",
    "check_torch",
    "counting",
    "keeping",
    "noting",
    "packing_of",
    "refuse_written",
    "watchers",
    "why_never",
]
