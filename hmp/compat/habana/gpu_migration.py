"""`habana_frameworks.torch.gpu_migration`: has a script for CUDA run on Gaudi; where CUDA stands for "hpu" it runs as it is."""

from __future__ import annotations

from .device_map import standing
from .nothing import does_nothing

__all__: list[str] = []

_tell = does_nothing("gpu_migration", "CUDA stands for 'hpu' here, and the script's calls for CUDA are right as they are")


def on_import() -> None:
    """ImportError where another device than CUDA stands for "hpu"."""
    here = standing().type
    if here != "cuda":
        raise ImportError(
            f"habana_frameworks.torch.gpu_migration turns calls for CUDA into calls for Gaudi, and here {here!r} stands for 'hpu'; write "
            "the device 'hpu' in the script and leave this import out, or give --device-map hpu=cuda"
        )
    _tell()
