"""The hook that runs after imports: torch imports much of itself late, Dynamo at the first compilation, and other libraries come late too.

It patches what is imported only then, and puts torch's builtins back into modules of torch's that took PatchedOps.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import overrides

from ..active import state
from ..patching import names, patches
from ..torch_private import device_mode

_ROOTS = frozenset({"torch", "torchgen", "functorch", "torch_xla"})
_then: dict[str, Callable[[], None]] = {}


def install() -> None:
    """Put the hook in place until patches.restore()."""

    def undo() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        _then.clear()

    finder = _AfterImports()
    sys.meta_path.insert(0, finder)
    patches.on_restore(undo)


def after(then: Mapping[str, Callable[[], None]]) -> None:
    """Call each function of `then` once the module that it is named by is imported: now, or when that happens before patches.restore()."""
    _then.update(then)
    for name, each in then.items():
        if name in sys.modules:
            each()


class _AfterImports(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return the spec of a module of torch, or of one that `after` was called for; None for other modules."""
        is_torchs = name.partition(".")[0] in _ROOTS
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if is_torchs or name in _then else None
        loader: Any = spec.loader if spec is not None else None
        if not isinstance(loader, importlib.machinery.SourceFileLoader):
            return None
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module  # the loader's own again
            if is_torchs:
                state.call_without_casts(execute, module)
                names.restore_in(module)
            else:
                execute(module)
            if name in _then and self in sys.meta_path:
                _then[name]()
                names.replace_references()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_CACHED: Any = type(functools.lru_cache(lambda: None))


def fill_tables() -> None:
    """Have torch fill its tables of functions with its own, before anything is patched; takes 25 ms, once.

    They are what functions of these modules return that take no argument and cache their result.
    """
    for module in (overrides, device_mode):
        for value in list(vars(module).values()):
            if isinstance(value, _CACHED) and not inspect.signature(value).parameters:
                value()
