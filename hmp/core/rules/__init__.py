"""Wrappers: the functions that cast the inputs of an op by its rule, and call the op."""

from . import jit_trace, kernel_fallback, lost_writes, rules
from .float32_products import replaces_autocast
from .kernel_fallback import fallbacks, fallbacks_of
from .op_rule import CastRule, Op, OpRule, writes
from .rules import op_wrap
from .saturation import takes_masks

__all__ = [
    "CastRule",
    "Op",
    "OpRule",
    "fallbacks",
    "fallbacks_of",
    "jit_trace",
    "kernel_fallback",
    "lost_writes",
    "op_wrap",
    "replaces_autocast",
    "rules",
    "takes_masks",
    "writes",
]
