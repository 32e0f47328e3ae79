"""Patches of torch's Python code around ops: optimizers, backward, checkpoints, construction of modules, torch.autocast."""

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
