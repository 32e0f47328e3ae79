"""The logger, and where a call comes from: the line of the user's code and the nn.Module."""

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
