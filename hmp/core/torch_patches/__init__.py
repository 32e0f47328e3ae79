"""Patches of torch's Python code around ops: optimizers, backward, checkpoints, construction of modules."""

from . import (
    backward,
    kept_weights,
    late_imports,
    library_ops,
    model_wrappers,
    module_calls,
    module_construction,
    module_state,
    modules,
    uncast_functions,
)
from .module_calls import applied_policy, as_dtype, in_dtype

__all__ = [
    "applied_policy",
    "as_dtype",
    "backward",
    "in_dtype",
    "kept_weights",
    "late_imports",
    "library_ops",
    "model_wrappers",
    "module_calls",
    "module_construction",
    "module_state",
    "modules",
    "uncast_functions",
]
