"""What ops keep for backward, packed into few bits until backward asks for it."""

from .copies import noting
from .formats import FORMATS
from .hooks import check_torch, counting, counts, keeping
from .kept import Exact, is_pending
from .packable import KEEPS, why_never
from .watching import watchers

__all__ = ["FORMATS", "KEEPS", "Exact", "check_torch", "counting", "counts", "is_pending", "keeping", "noting", "watchers", "why_never"]
