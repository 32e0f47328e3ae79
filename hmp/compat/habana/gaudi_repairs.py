"""transformers puts functions of its own into torch where it finds an "hpu": repairs for Gaudi's, which nothing here needs.

They would stay when the shim is gone, and its torch.compile asks for a backend that is Habana's alone. So transformers is told of the
device by a function that repairs nothing.
"""

from __future__ import annotations

import sys
import types

import torch

from ..import_finders import after_import
from .replacements import Replacements

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "is_torch_hpu_available"  # it repairs when it is asked, which importing transformers does


def install(replaced: Replacements) -> None:
    """Sees to a transformers that is imported until `replaced.undo()`; called before torch has an "hpu", it sees to one that was before."""
    imported = sys.modules.get(_MODULE)
    if imported is None:
        replaced.on_undo(after_import(_MODULE, _repair_nothing))
    elif hasattr(imported, _FUNCTION):
        getattr(imported, _FUNCTION)()  # it keeps what it finds: no device, and nothing to repair


def is_torch_hpu_available() -> bool:
    """Whether a device stands for "hpu" now."""
    hpu = getattr(torch, "hpu", None)
    return hpu is not None and bool(hpu.is_available())


def _repair_nothing(module: types.ModuleType) -> None:
    if hasattr(module, _FUNCTION):  # releases before 4.50 have none
        setattr(module, _FUNCTION, is_torch_hpu_available)
