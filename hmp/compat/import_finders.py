"""What hmp does when a program imports something: what finders have in common, and something to be done after an import."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader

_CATCH_IT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}  # that a module is not there


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


def can_do_without() -> bool:
    """Whether the program's statement that is running stands in a `try` that catches an ImportError. False where there is no source."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    if frame is None:
        return False
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    return any(
        node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or 0) and any(map(_catches, node.handlers))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Try)
    )


def _catches(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(isinstance(node, ast.Name) and node.id in _CATCH_IT for node in ast.walk(handler.type))


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
