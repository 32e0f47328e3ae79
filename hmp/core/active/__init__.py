"""The policy that is active in this thread or asyncio task, and the contexts that change it."""

from . import regions, state, suspensions
from .regions import Region, disable_casts, enable_casts, without_casts
from .state import (
    PROCESS,
    EnteredRegion,
    InBackward,
    Off,
    PolicyTable,
    Replacements,
    UnderCapturedState,
    call_without_casts,
    casts_enabled,
    current_state,
    is_by_user,
)
from .suspensions import Suspension

__all__ = [
    "PROCESS",
    "EnteredRegion",
    "InBackward",
    "Off",
    "PolicyTable",
    "Region",
    "Replacements",
    "Suspension",
    "UnderCapturedState",
    "call_without_casts",
    "casts_enabled",
    "current_state",
    "disable_casts",
    "enable_casts",
    "is_by_user",
    "regions",
    "state",
    "suspensions",
    "without_casts",
]
