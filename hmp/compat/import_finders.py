"""Import finders: modules made by hmp, lookups in other finders, and callbacks after an import."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader


class Made(Loader):
    """A loader of a module made by hmp: `fill(module)` sets its names.

    All are packages, so that `from module import name` asks the finder for a missing name, which raises an error with its own message.
    """

    def __init__(self, fill: Callable[[types.ModuleType], None]) -> None:
        self.fill = fill

    def spec(self, name: str) -> ModuleSpec:
        """Return the spec of the module of that name."""
        return ModuleSpec(name, self, origin=__package__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python creates the module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill the module."""
        self.fill(module)


def is_made_by(fill: Callable[[types.ModuleType], None], name: str) -> bool:
    """Return True if a module of that name is imported and was filled by `fill`."""
    loader = getattr(sys.modules.get(name), "__loader__", None)
    return isinstance(loader, Made) and loader.fill == fill


def forget(name: str) -> None:
    """Remove the module from sys.modules and from its package."""
    module = sys.modules.pop(name)
    parent, _, child = name.rpartition(".")
    if vars(sys.modules.get(parent, module)).get(child) is module:
        delattr(sys.modules[parent], child)


def found_by_others(
    asking: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> ModuleSpec | None:
    """Return the spec from the finders after `asking`, or None."""
    for finder in sys.meta_path[sys.meta_path.index(asking) + 1 :]:
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


def is_an_import() -> bool:
    """Return True if an import statement caused the `find_spec()` that calls this, False for importlib.util.find_spec()."""
    asking = sys._getframe(3)  # above find_spec() and the import system's _find_spec()
    return asking.f_code.co_name == "_find_and_load_unlocked"


def after_import(name: str, then: Callable[[types.ModuleType], None]) -> Callable[[], None]:
    """Call `then(module)` after the module is imported, now if it is; return a function that cancels this."""
    if name in sys.modules:
        then(sys.modules[name])
        return lambda: None
    finder = _WaitingFinder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _WaitingFinder(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        spec = found_by_others(self, fullname, path, target) if fullname == self._name else None
        loader = spec.loader if spec is not None else None
        if not isinstance(loader, SourceFileLoader):
            return None
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # restore
            execute(module)
            if self in sys.meta_path:
                self.leave()
                self._then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
