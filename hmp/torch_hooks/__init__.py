"""Patches of torch's code that is no op: optimizers, backward, checkpoints, construction, torch.autocast."""

from . import (
    autocast,
    backward,
    checkpoint,
    dispatch_modes,
    late_imports,
    module_calls,
    module_construction,
    module_state,
    modules,
    never_cast,
    optimizers,
    override_tables,
)
from .module_calls import given_to

__all__ = [
    "autocast",
    "backward",
    "checkpoint",
    "dispatch_modes",
    "given_to",
    "late_imports",
    "module_calls",
    "module_construction",
    "module_state",
    "modules",
    "never_cast",
    "optimizers",
    "override_tables",
]
