"""Reversible patches of torch: functions are put in the places of torch's own, and torch's own put back. Knows nothing of casts."""

from . import names, patches
from .names import SKIPPED, instances, subclasses
from .patched_op import PatchedMethod, PatchedOp, unpatched_op

__all__ = ["SKIPPED", "PatchedMethod", "PatchedOp", "instances", "names", "patches", "subclasses", "unpatched_op"]
