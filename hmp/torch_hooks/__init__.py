"""Patches of torch's Python code around ops: optimizers, backward, checkpoints, construction of modules, torch.autocast."""

from . import (
    around_models,
    autocast,
    backward,
    captures,
    checkpoint,
    dispatch_modes,
    late_imports,
    library_ops,
    module_calls,
    module_construction,
    module_state,
    modules,
    never_cast,
    optimizers,
    override_tables,
    resizing,
    scripted,
)
from .module_calls import applied_policy

__all__ = [
    "applied_policy",
    "around_models",
    "autocast",
    "backward",
    "captures",
    "checkpoint",
    "dispatch_modes",
    "late_imports",
    "library_ops",
    "module_calls",
    "module_construction",
    "module_state",
    "modules",
    "never_cast",
    "optimizers",
    "override_tables",
    "resizing",
    "scripted",
]
