"""Turns a policy into wrappers, one for each torch function that it changes, and replaces it by a PatchedOp that calls the wrapper."""

from . import decisions, dispatching_ops, placement, user_functions
from .user_functions import bf16_function, fp32_function, promote_function

__all__ = [
    "bf16_function",
    "decisions",
    "dispatching_ops",
    "fp32_function",
    "placement",
    "promote_function",
    "user_functions",
]
