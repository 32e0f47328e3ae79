"""The policy that is active in this thread or asyncio task, and the contexts that change it."""

from . import autocast, regions, state
from .regions import Region, disable_casts, enable_casts, without_casts
from .state import (
    PROCESS,
    EnteredRegion,
    InBackward,
    Off,
    PolicyTable,
    UnderCapturedState,
    call_without_casts,
    casts_enabled,
    current_state,
)

__all__ = [
    "PROCESS",
    "EnteredRegion",
    "InBackward",
    "Off",
    "PolicyTable",
    "Region",
    "UnderCapturedState",
    "autocast",
    "call_without_casts",
    "casts_enabled",
    "current_state",
    "disable_casts",
    "enable_casts",
    "regions",
    "state",
    "without_casts",
]
