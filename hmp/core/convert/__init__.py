"""Activates policies: convert() for the process, casts() for a context, apply() for a module's calls."""

from ..rules import Op, OpRule, op_wrap
from ..torch_patches.module_calls import applied_policy, in_dtype, matches, names_of, paths_of
from .applied_models import apply, keep_float32, remove
from .conversion import Handle, any_applied, casts, convert, is_converted, is_in_place, register, revert, set_low_kernels
from .policy_tables import any_policy_used
from .script_models import convert_script

__all__ = [
    "Handle",
    "Op",
    "OpRule",
    "any_applied",
    "any_policy_used",
    "applied_policy",
    "apply",
    "casts",
    "convert",
    "convert_script",
    "in_dtype",
    "is_converted",
    "is_in_place",
    "keep_float32",
    "matches",
    "names_of",
    "op_wrap",
    "paths_of",
    "register",
    "remove",
    "revert",
    "set_low_kernels",
]
