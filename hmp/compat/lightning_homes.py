"""The two packages that Lightning's Trainer comes in, which are the same code twice, and which release of them is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from ..errors import to_install

HOMES = ("lightning.pytorch", "pytorch_lightning")
STAND_IN = "hmp's stand-in for lightning_habana"  # who needs them, in an error


def installed(who: str) -> list[str]:
    """Those of them that are installed. ImportError where none is, or none new enough: it names who needs one."""
    found = [home for home in HOMES if importlib.util.find_spec(_package(home)) is not None]
    if not found:
        raise ModuleNotFoundError(f"{who} needs lightning or pytorch_lightning, and neither is installed: {to_install('lightning')}")
    fitting = [home for home in found if release(home) >= (1, 6)]
    if not fitting:
        there = " and ".join(f"{_package(home)} {importlib.metadata.version(_package(home))}" for home in found)
        raise ImportError(f"{who} needs lightning or pytorch_lightning 1.6 or later, and {there} is installed: {to_install('lightning')}")
    return fitting


def release(home: str) -> tuple[int, int]:
    """The release of that package which is installed, such as 2 and 6."""
    major, minor = importlib.metadata.version(_package(home)).split(".")[:2]
    return int(major), int(minor)


def has_gaudi(home: str) -> bool:
    """Whether that package has Gaudi itself: releases before 2.1, whose "hpu" is lightning_habana's since."""
    return release(home) < (2, 1)


def without_gaudi() -> list[str]:
    """Those that are installed and are told by lightning_habana what "hpu" is."""
    return [home for home in installed(STAND_IN) if not has_gaudi(home)]


def preferred(who: str) -> str:
    """The one that the program has imported; of both, or before it has imported one, the first that is installed."""
    found = installed(who)
    imported = [home for home in found if home in sys.modules]
    return imported[0] if imported else found[0]


def _package(home: str) -> str:
    return home.partition(".")[0]
