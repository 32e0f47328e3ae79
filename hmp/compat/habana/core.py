"""`habana_frameworks.torch.core`: what asks for lazy mode, which there is not here."""

from __future__ import annotations

from . import hpu

__all__ = ["hpu", "is_lazy"]


def is_lazy() -> bool:
    """False: ops run when they are called."""
    return False
