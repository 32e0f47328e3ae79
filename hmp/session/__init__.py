"""Which policy is in force, and for whom: convert, casts, apply."""

from .conversion import Handle, apply, casts, convert, is_converted, observed_by, register, remove, revert

__all__ = [
    "Handle",
    "apply",
    "casts",
    "convert",
    "is_converted",
    "observed_by",
    "register",
    "remove",
    "revert",
]
