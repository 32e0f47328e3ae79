"""`habana_frameworks.torch.core`: the calls of lazy mode, which do nothing here and say so once."""

from __future__ import annotations

from . import hpu
from .nothing import does_nothing

__all__ = [
    "hpu",
    "hpu_inference_initialize",
    "hpu_inference_set_env",
    "hpu_initialize",
    "hpu_reset_env",
    "hpu_set_env",
    "hpu_set_inference_env",
    "hpu_teardown_inference_env",
    "is_lazy",
    "mark_step",
]

mark_step = does_nothing("mark_step", "ops run when they are called, and no graph waits to be started")
hpu_initialize = does_nothing("hpu_initialize")
hpu_inference_initialize = does_nothing("hpu_inference_initialize")
hpu_set_env = does_nothing("hpu_set_env")
hpu_reset_env = does_nothing("hpu_reset_env")
hpu_set_inference_env = does_nothing("hpu_set_inference_env")
hpu_inference_set_env = does_nothing("hpu_inference_set_env")
hpu_teardown_inference_env = does_nothing("hpu_teardown_inference_env")


def is_lazy() -> bool:
    """False: ops run when they are called."""
    return False
