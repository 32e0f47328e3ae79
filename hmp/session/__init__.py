"""Which policy is in force, and for whom: convert, casts, apply."""

from ..torch_hooks import given_to
from ..wrapping import Op, OpRule, op_wrap
from .conversion import Handle, any_applied, apply, casts, convert, is_converted, is_in_place, observed_by, register, remove, revert

__all__ = [
    "Handle",
    "Op",
    "OpRule",
    "any_applied",
    "apply",
    "casts",
    "convert",
    "given_to",
    "is_converted",
    "is_in_place",
    "observed_by",
    "op_wrap",
    "register",
    "remove",
    "revert",
]
