"""Keeps hmp's PatchedOps out of what torch makes of its functions while they are patched: modules that it imports, tables that it fills.

torch imports much of itself late: Dynamo at the first compilation, and with it torch._numpy, tables of quantization and of DTensor. Its
tables say which functions `__torch_function__` can override, and to which a device as a context or as the default applies.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import overrides

from ..active import state
from ..patching import holders, patches, references
from ..torch_private import device_mode

_ROOTS = frozenset({"torch", "torchgen", "functorch", "torch_xla"})


class _Imports(threading.local):
    def __init__(self) -> None:
        self.modules: list[types.ModuleType] = []  # those whose import is in progress, and those that they have imported
        self.depth = 0


_imports = _Imports()
_then: dict[str, Callable[[], None]] = {}


def install(own: Callable[[Any], Any]) -> None:
    """Until patches.restore(): replaces PatchedOps by torch's functions in every module of torch that is imported from now on.

    `own` returns torch's function for a PatchedOp, and anything else as it is.
    """
    finder = _TorchFinder(own)
    sys.meta_path.insert(0, finder)
    patches.on_restore(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
    patches.on_restore(_then.clear)


def after(then: Mapping[str, Callable[[], None]]) -> None:
    """Call each function of `then` once the module that it is named by is imported: now, or when that happens before patches.restore()."""
    _then.update(then)
    for name, each in then.items():
        if name in sys.modules:
            each()


class _TorchFinder(importlib.abc.MetaPathFinder):
    def __init__(self, own: Callable[[Any], Any]) -> None:
        self._own = own

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return the spec of a module of torch, or of one that `after` was called for; None for other modules.

        Its loader replaces PatchedOps in a module of torch after executing it.
        """
        is_torchs = name.partition(".")[0] in _ROOTS
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if is_torchs or name in _then else None
        loader: Any = spec.loader if spec is not None else None
        if not isinstance(loader, importlib.machinery.SourceFileLoader):
            return None
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module  # the loader's own again
            if is_torchs:
                self._execute_torchs(execute, module)
            else:
                execute(module)
            if name in _then and self in sys.meta_path:
                _then[name]()
                references.follow_in([module] if is_torchs else [])

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _execute_torchs(self, execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
        _imports.modules.append(module)
        _imports.depth += 1
        try:
            state.call_without_casts(execute, module)
        finally:
            _imports.depth -= 1
            if not _imports.depth:
                modules, _imports.modules = _imports.modules, []
                _put_back(modules, self._own)
                references.follow_in(modules)


# Classes of objects that hold no function: most of what is in a module.
_ATOMS = frozenset({str, int, float, bool, bytes, type(None), types.ModuleType, types.BuiltinFunctionType, types.CodeType})


def _put_back(modules: list[types.ModuleType], own: Callable[[Any], Any]) -> None:
    """Replace PatchedOps by torch's own functions in all objects that are reached from the globals of these modules.

    These are dicts, lists and the like, functions, classes and objects of these modules, and what they contain.
    """
    names = {module.__name__ for module in modules}
    seen: dict[int, Any] = {}
    todo: list[Any] = [vars(module) for module in modules]
    while todo:
        holder = todo.pop()
        if id(holder) in seen:
            continue
        seen[id(holder)] = holder  # a reference, so that no other object gets this id
        kind = holders.kind_of(holder)
        from_module = holder if kind in (holders.FUNCTION, holders.CLASS) else type(holder) if kind is holders.OBJECT else None
        if from_module is None or from_module.__module__ in names:
            holders.replace(holder, lambda value: _unpatched(value, own))
            todo += [each for each in holders.inside(holder) if type(each) not in _ATOMS]


def _unpatched(value: Any, own: Callable[[Any], Any]) -> Any:
    """Return torch's function for a PatchedOp.

    A new tuple, frozenset or static method for one with a PatchedOp in it; any other value itself.
    """
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind is staticmethod:
        function = own(value.__func__)
        return value if function is value.__func__ else staticmethod(function)
    if not issubclass(kind, (tuple, frozenset)):
        return own(value)
    others = [_unpatched(each, own) for each in value]
    if all(a is b for a, b in zip(others, value, strict=True)):
        return value
    return getattr(kind, "_make", kind)(others)


# --- tables of functions that torch fills late ----------------------------------------------------------------------------------


_CACHED: Any = type(functools.lru_cache(lambda: None))


def fill_tables() -> None:
    """Fill the tables that are empty, with torch's own functions (R19). To be called before anything is patched; takes 25 ms, once."""
    for table in _tables():
        table()


def _tables() -> Iterator[Callable[[], Any]]:
    """Yield the functions of these modules of torch's that take no argument and cache their result."""
    for module in (overrides, device_mode):
        for value in list(vars(module).values()):
            function = getattr(value, "__wrapped__", None)
            if isinstance(value, _CACHED) and isinstance(function, types.FunctionType) and not inspect.signature(function).parameters:
                yield value
