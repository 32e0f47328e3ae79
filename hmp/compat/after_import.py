"""Something to be done to a module of another package as soon as a program has imported it, and without importing it for that."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader

from .import_finders import found_by_others


def after_import(name: str, then: Callable[[types.ModuleType], None]) -> Callable[[], None]:
    """Calls `then(module)` once the module of that name is imported, now if it is; the function given back calls that off."""
    if name in sys.modules:
        then(sys.modules[name])
        return lambda: None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Finder(MetaPathFinder):
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
            vars(loader).pop("exec_module", None)  # as it was
            execute(module)
            if self in sys.meta_path:
                self.leave()
                self._then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
