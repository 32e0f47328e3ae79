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
from .model_outputs import as_dtype, in_dtype
from .module_calls import applied_policy

__all__ = [
    "applied_policy",
    "around_models",
    "as_dtype",
    "autocast",
    "backward",
    "captures",
    "checkpoint",
    "dispatch_modes",
    "in_dtype",
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
