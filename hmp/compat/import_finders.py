"""What the other import finders say of a module, asked by one that stands before them."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

__all__ = ["found_by_others"]


def found_by_others(
    asking: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> ModuleSpec | None:
    """The spec that the first of the finders after `asking` has for the module; None where none has one."""
    for finder in sys.meta_path[sys.meta_path.index(asking) + 1 :]:
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None
