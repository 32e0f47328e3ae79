"""Puts torch's own functions back where modules of torch that are imported while torch is patched have got hmp's dispatchers.

torch imports much of itself late: Dynamo at the first compilation, and with it torch._numpy, tables of quantization and of DTensor.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..context import state
from ..patching import patches

_ROOTS = frozenset({"torch", "torchgen", "functorch"})


class _Imports(threading.local):
    def __init__(self) -> None:
        self.modules: list[types.ModuleType] = []  # those whose import is in progress, and those that they have imported
        self.depth = 0


_imports = _Imports()
_then: dict[str, Callable[[], None]] = {}


def install(own: Callable[[Any], Any]) -> None:
    """Until patches.restore(): replaces dispatchers by torch's functions in every module of torch that is imported from now on.

    `own` returns torch's function for a dispatcher, and anything else as it is.
    """
    finder = _Finder(own)
    sys.meta_path.insert(0, finder)
    patches.on_restore(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
    patches.on_restore(_then.clear)


def after(then: Mapping[str, Callable[[], None]]) -> None:
    """Calls each function of `then` once the module that it is named by is imported: now, or when that happens before patches.restore()."""
    _then.update(then)
    for name, each in then.items():
        if name in sys.modules:
            each()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, own: Callable[[Any], Any]) -> None:
        self._own = own

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """The spec of a module of torch, with a loader that replaces dispatchers in it after executing it; None for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name.partition(".")[0] in _ROOTS else None
        loader: Any = spec.loader if spec is not None else None
        if not isinstance(loader, importlib.machinery.SourceFileLoader):
            return None
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module  # the loader's own again
            _imports.modules.append(module)
            _imports.depth += 1
            try:
                state.call_without_casts(execute, module)
            finally:
                _imports.depth -= 1
                if not _imports.depth:
                    modules, _imports.modules = _imports.modules, []
                    _ObjectsOf(self._own, modules).replace_dispatchers()
            if name in _then and self in sys.meta_path:
                _then[name]()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _ObjectsOf:
    """All objects that are reached from some modules' globals: dicts, lists, classes and functions of theirs, and what these contain."""

    def __init__(self, own: Callable[[Any], Any], modules: list[types.ModuleType]) -> None:
        self._own = own
        self._modules = modules
        self._names = {module.__name__ for module in modules}
        self._seen: dict[int, Any] = {}
        self._containers: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
            (dict, self._in_dict), (list, self._in_list), (set, self._in_set), ((tuple, frozenset), list),
        )  # fmt: skip

    def replace_dispatchers(self) -> None:
        """Replaces dispatchers by torch's own functions in all these objects."""
        todo: list[Any] = [vars(module) for module in self._modules]
        while todo:
            holder = todo.pop()
            if id(holder) not in self._seen:
                self._seen[id(holder)] = holder  # a reference, so that no other object gets this id
                todo += self._mended(holder)

    def _mended(self, holder: Any) -> list[Any]:
        """Replaces dispatchers in `holder`; returns the objects in it, which may contain more."""
        kind = type(holder)
        for kinds, mended in self._containers:
            if issubclass(kind, kinds):
                return mended(holder)
        if kind is types.CellType:
            return self._in_cell(holder)
        if kind is types.FunctionType:
            return self._in_function(holder) if holder.__module__ in self._names else []
        if issubclass(kind, type):
            return self._in_class(holder) if holder.__module__ in self._names else []
        if issubclass(kind, (staticmethod, classmethod)):
            return [holder.__func__]
        if kind is functools.partial:
            return [holder.func, *holder.args, holder.keywords]
        return [vars(holder)] if kind.__module__ in self._names and hasattr(holder, "__dict__") else []

    def _in_dict(self, container: dict[Any, Any]) -> list[Any]:
        items = [(key, value, self._other(key), self._other(value)) for key, value in dict.items(container)]
        if any(key is not own for key, _, own, _ in items):
            container.clear()  # so that the order is as it was
            container.update((own, value) for _, _, own, value in items)
        else:
            container.update((key, own) for key, value, _, own in items if value is not own)
        return [each for item in items for each in item[2:]]

    def _in_list(self, container: list[Any]) -> list[Any]:
        for i, value in enumerate(container):
            other = self._other(value)
            if other is not value:
                container[i] = other
        return list(container)

    def _in_set(self, container: set[Any]) -> list[Any]:
        for value in [value for value in container if self._other(value) is not value]:
            container.remove(value)
            container.add(self._other(value))
        return list(container)

    def _in_function(self, function: types.FunctionType) -> list[Any]:
        function.__defaults__ = self._other(function.__defaults__)
        return [*(function.__closure__ or ()), *(function.__defaults__ or ()), function.__kwdefaults__, vars(function)]

    def _in_cell(self, cell: types.CellType) -> list[Any]:
        try:
            cell.cell_contents = self._other(cell.cell_contents)
        except ValueError:  # not filled
            return []
        return [cell.cell_contents]

    def _in_class(self, cls: type) -> list[Any]:
        for name, value in list(vars(cls).items()):
            other = self._other(value)
            if other is not value:
                setattr(cls, name, other)
        return list(vars(cls).values())

    def _other(self, value: Any) -> Any:
        """torch's function for a dispatcher; a new tuple or frozenset for one with a dispatcher in it; any other value itself."""
        kind: Any = type(value)
        if not issubclass(kind, (tuple, frozenset)):
            return self._own(value)
        others = [self._other(each) for each in value]
        if all(a is b for a, b in zip(others, value, strict=True)):
            return value
        return getattr(kind, "_make", kind)(others)
