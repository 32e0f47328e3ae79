"""Turns a policy into wrappers, one for each torch function that it changes, and replaces it by a PatchedOp that calls the wrapper."""

from . import active_ops, decisions, placement, user_functions
from .active_ops import ActiveFunction, ActiveMethod, ActiveOp, ActiveOperator
from .user_functions import bf16_function, fp32_function, promote_function

__all__ = [
    "ActiveFunction",
    "ActiveMethod",
    "ActiveOp",
    "ActiveOperator",
    "active_ops",
    "bf16_function",
    "decisions",
    "fp32_function",
    "placement",
    "promote_function",
    "user_functions",
]
