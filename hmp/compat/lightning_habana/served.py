"""The packages whose Trainer is told what "hpu" is."""

from __future__ import annotations

from ..lightning_homes import has_gaudi, installed

__all__ = ["WHO", "served"]

WHO = "hmp's stand-in for lightning_habana"


def served() -> list[str]:
    """Those that are installed and have no Gaudi of their own."""
    return [home for home in installed(WHO) if not has_gaudi(home)]
