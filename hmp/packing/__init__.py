"""The saved list: what ops save for backward, packed into few bits until backward asks for it.

The list that brings it to policies is `listed.py`, which is imported when somebody asks for the kinds of lists.
"""

from .copies import noting
from .formats import FORMATS
from .hooks import check_torch, packing_wrapper
from .packable import KEEPS, packing_of, why_never

__all__ = ["FORMATS", "KEEPS", "check_torch", "noting", "packing_of", "packing_wrapper", "why_never"]
