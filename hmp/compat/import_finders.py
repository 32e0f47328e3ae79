"""What an import finder asks: what those behind it say of a module, and who wants to know."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

__all__ = ["found_by_others", "is_an_import"]


def found_by_others(
    asking: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> ModuleSpec | None:
    """The spec that the first of the finders after `asking` has for the module; None where none has one."""
    for finder in sys.meta_path[sys.meta_path.index(asking) + 1 :]:
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


def is_an_import() -> bool:
    """Whether an import statement asks the `find_spec()` that calls this: importlib.util.find_spec() only wants to know, and is told that
    there is nothing."""
    asking = sys._getframe(3)  # behind find_spec() and the import system's _find_spec()
    return asking.f_code.co_name == "_find_and_load_unlocked"
