"""Activates policies: convert() for the process, casts() for a context, apply() for a module's calls."""

from ..rules import Op, OpRule, op_wrap
from ..torch_patches import applied_policy, in_dtype
from .applied_models import apply, remove
from .conversion import Handle, any_applied, casts, convert, is_converted, is_in_place, register, revert, set_low_kernels
from .policy_tables import any_policy_used
from .script_models import convert_script
from .unreachable_names import Unreachable, unreachable

__all__ = [
    "Handle",
    "Op",
    "OpRule",
    "Unreachable",
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
    "op_wrap",
    "register",
    "remove",
    "revert",
    "set_low_kernels",
    "unreachable",
]
