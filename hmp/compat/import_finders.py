"""What import finders have in common: what they ask, modules that they make, and how these are forgotten."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class Made(Loader):
    """Makes a module of hmp's, to which `fill` gives its names. All are packages: `from module import name` then comes to the finder for a
    name that the module has not, which gives the error its words."""

    def __init__(self, fill: Callable[[types.ModuleType], None]) -> None:
        self.fill = fill

    def spec(self, name: str) -> ModuleSpec:
        """That of the module of that name."""
        return ModuleSpec(name, self, origin=__package__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """None: a module like any other."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Fills it."""
        self.fill(module)


def is_made_by(fill: Callable[[types.ModuleType], None], name: str) -> bool:
    """Whether a module of that name was imported, and has its names of `fill`."""
    loader = getattr(sys.modules.get(name), "__loader__", None)
    return isinstance(loader, Made) and loader.fill == fill


def forget(name: str) -> None:
    """Takes the module out of those that were imported, and out of the package that it is in."""
    module = sys.modules.pop(name)
    parent, _, child = name.rpartition(".")
    if vars(sys.modules.get(parent, module)).get(child) is module:
        delattr(sys.modules[parent], child)


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
