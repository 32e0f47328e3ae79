"""The logger, and the line of the user's code that a call comes from."""

from .call_sites import PACKAGES, caller
from .logger import log, speaks

__all__ = [
    "PACKAGES",
    "caller",
    "log",
    "speaks",
]
