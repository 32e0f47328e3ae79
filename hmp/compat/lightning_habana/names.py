"""The names of `lightning_habana`: hmp's, and where Lightning has Gaudi itself (1.6 to 2.0) its own, which are the same classes."""

from __future__ import annotations

import importlib
from typing import Any

from ..lightning_homes import STAND_IN, has_gaudi, preferred

_home = preferred(STAND_IN)  # before anything here imports the other
_modules = [f"{_home}.accelerators", f"{_home}.plugins", f"{_home}.strategies"]
if not has_gaudi(_home):
    _modules = [f"{__package__}.accelerator", f"{__package__}.precision", f"{__package__}.strategies"]
_accelerators, _plugins, _strategies = (importlib.import_module(module) for module in _modules)

HPUAccelerator: Any = _accelerators.HPUAccelerator
HPUPrecisionPlugin: Any = _plugins.HPUPrecisionPlugin
SingleHPUStrategy: Any = _strategies.SingleHPUStrategy
HPUParallelStrategy: Any = _strategies.HPUParallelStrategy
HPUDDPStrategy: Any = getattr(_strategies, "HPUDDPStrategy", HPUParallelStrategy)


def __getattr__(name: str) -> bool:
    if name == "HPU_AVAILABLE":  # asked for when the shim is in place, which may be for another device the next time
        return bool(HPUAccelerator.is_available())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
