"""The two packages that contain Lightning's Trainer, which are the same code twice, and their installed releases."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from ..errors import to_install

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
SHIM = "hmp's replacement for lightning_habana"  # who needs a package, in an error


def installed(who: str, oldest: tuple[int, int] = (1, 8)) -> list[str]:
    """Return the installed packages. Raise ImportError, which says that `who` needs one, if none is installed or all are too old."""
    found = [package for package in PACKAGES if importlib.util.find_spec(_distribution(package)) is not None]
    if not found:
        raise ModuleNotFoundError(f"{who} expected lightning or pytorch_lightning, got neither; {to_install('lightning')}")
    fitting = [package for package in found if release(package) >= oldest]
    if not fitting:
        there = " and ".join(f"{_distribution(package)} {importlib.metadata.version(_distribution(package))}" for package in found)
        raise ImportError(
            f"{who} expected lightning or pytorch_lightning {'.'.join(map(str, oldest))} or later, got {there}; {to_install('lightning')}"
        )
    return fitting


def release(package: str) -> tuple[int, int]:
    """Return the installed release of that package, such as (2, 6)."""
    major, minor = importlib.metadata.version(_distribution(package)).split(".")[:2]
    return int(major), int(minor)


def has_gaudi(package: str) -> bool:
    """Return True if that package supports Gaudi itself: releases before 2.1, when this moved to lightning_habana."""
    return release(package) < (2, 1)


def without_gaudi() -> list[str]:
    """Return the installed packages that support "hpu" with lightning_habana only."""
    return installed(SHIM, (2, 1))


def preferred(found: list[str]) -> str:
    """Return the one of the packages that the program has imported; if it has imported both or neither, the first."""
    return next((package for package in found if package in sys.modules), found[0])


def _distribution(package: str) -> str:
    return package.partition(".")[0]
