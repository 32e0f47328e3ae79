"""`habana_frameworks.torch.utils.debug`: every function that is asked for does nothing and says so once."""

from __future__ import annotations

from typing import Any

from .nothing import does_nothing

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'habana_frameworks.torch.utils.debug' has no attribute {name!r}")
    return does_nothing(name, "it looks into Habana's graph compiler")
