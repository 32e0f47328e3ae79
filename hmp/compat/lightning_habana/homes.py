"""The two packages that Lightning's Trainer comes in, which are the same code twice."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["HOMES", "installed", "preferred"]

HOMES = ("lightning.pytorch", "pytorch_lightning")


def installed() -> list[str]:
    """Those of them that are installed. ModuleNotFoundError where none is."""
    found = [home for home in HOMES if importlib.util.find_spec(home.partition(".")[0]) is not None]
    if not found:
        raise ModuleNotFoundError(
            "hmp's stand-in for lightning_habana needs lightning or pytorch_lightning, and neither is installed; "
            "pip install hmp-torch[lightning]"
        )
    return found


def preferred() -> str:
    """The one that the program has imported; of both, or before it has imported one, the first that is installed."""
    found = installed()
    imported = [home for home in found if home in sys.modules]
    return imported[0] if imported else found[0]
