"""`habana_frameworks.torch.utils.library_loader`: nothing is to be loaded."""

from __future__ import annotations

from . import hpu

__all__ = ["is_habana_avaialble", "is_habana_available", "load_habana_module"]


def load_habana_module() -> None:
    """Nothing: the device "hpu" is mapped since the shim was installed."""


def is_habana_available() -> bool:
    """Whether a device stands for "hpu"."""
    return hpu.is_available()


is_habana_avaialble = is_habana_available  # so spelled in older releases, and in the scripts written for them
