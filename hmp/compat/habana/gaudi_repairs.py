"""transformers puts functions of its own into torch where it finds an "hpu": repairs for Gaudi's, which nothing here needs.

They would stay when the shim is gone, and its torch.compile asks for a backend that is Habana's alone. So transformers is told of the
device by a function that repairs nothing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from .elsewhere import find_elsewhere

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "is_torch_hpu_available"  # it repairs when it is asked, which importing transformers does


def install() -> None:
    """Sees to a transformers that is imported from now on; called before the shim's names are there, it sees to one that was before."""
    imported = sys.modules.get(_MODULE)
    if imported is not None and hasattr(imported, _FUNCTION):
        getattr(imported, _FUNCTION)()  # it keeps what it finds: no device, and nothing to repair
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Sees to it no longer."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def is_torch_hpu_available() -> bool:
    """Whether a device stands for "hpu" now."""
    hpu = getattr(torch, "hpu", None)
    return hpu is not None and bool(hpu.is_available())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = find_elsewhere(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        if hasattr(module, _FUNCTION):  # releases before 4.50 have none
            setattr(module, _FUNCTION, is_torch_hpu_available)


_finder = _Finder()
