"""The logger, and whose line and module is calling."""

from .call_sites import PACKAGES, caller
from .logger import log, speaks
from .places import Modules, Place

__all__ = [
    "PACKAGES",
    "Modules",
    "Place",
    "caller",
    "log",
    "speaks",
]
