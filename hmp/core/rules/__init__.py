"""Wrappers: the functions that cast the inputs of an op by its rule, and call the op."""

from . import kernels, registry
from .emulation import replaces_autocast
from .kernels import fallbacks
from .op import CastRule, Op, OpUnderRule, writes
from .overflow import takes_masks
from .registry import op_wrap

__all__ = [
    "CastRule",
    "Op",
    "OpUnderRule",
    "fallbacks",
    "kernels",
    "op_wrap",
    "registry",
    "replaces_autocast",
    "takes_masks",
    "writes",
]
