"""Wrappers: the functions that cast the inputs of an op by its rule, and call the op."""

from . import kernel_fallback, lost_writes, rules, substitutes
from .float32_products import replaces_autocast
from .kernel_fallback import fallbacks, fallbacks_of
from .op_rule import CastRule, Op, OpRule, writes
from .rules import op_wrap
from .saturation import takes_masks
from .wrappers import one_dtype_wrapper

__all__ = [
    "CastRule",
    "Op",
    "OpRule",
    "fallbacks",
    "fallbacks_of",
    "kernel_fallback",
    "lost_writes",
    "one_dtype_wrapper",
    "op_wrap",
    "replaces_autocast",
    "rules",
    "substitutes",
    "takes_masks",
    "writes",
]
