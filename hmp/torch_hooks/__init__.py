"""Patches of torch's code that is no op: optimizers, backward, checkpoints, construction, torch.autocast."""

from . import autocast, late_imports, module_calls, module_construction, module_state, override_tables, plumbing
from .module_calls import given_to

__all__ = [
    "autocast",
    "given_to",
    "late_imports",
    "module_calls",
    "module_construction",
    "module_state",
    "override_tables",
    "plumbing",
]
