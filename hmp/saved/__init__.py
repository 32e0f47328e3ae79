"""What ops keep for backward, packed into few bits until backward asks for it."""

from .copies import noting
from .formats import FORMATS
from .hooks import keeping
from .packable import KEEP_NOTHING, why_never

__all__ = ["FORMATS", "KEEP_NOTHING", "keeping", "noting", "why_never"]
