"""What is in force in this thread or task."""

from . import regions, state
from .regions import Region, disable_casts, enable_casts, without_casts
from .state import PROCESS, Bound, CompiledPolicy, Entered, Held, InBackward, Off, Stretch, Table, call_without_casts, casts_enabled, here

__all__ = [
    "PROCESS",
    "Bound",
    "CompiledPolicy",
    "Entered",
    "Held",
    "InBackward",
    "Off",
    "Region",
    "Stretch",
    "Table",
    "call_without_casts",
    "casts_enabled",
    "disable_casts",
    "enable_casts",
    "here",
    "regions",
    "state",
    "without_casts",
]
