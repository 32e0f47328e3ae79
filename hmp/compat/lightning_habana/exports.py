"""The names of `lightning_habana`: hmp's classes, or those of Lightning 1.6 to 2.0, which supports Gaudi itself."""

from __future__ import annotations

import importlib
from typing import Any

from ..lightning_packages import SHIM, has_gaudi, preferred

_package = preferred(SHIM)  # before anything here imports the other package
_modules = [f"{_package}.accelerators", f"{_package}.plugins", f"{_package}.strategies"]
if not has_gaudi(_package):
    _modules = [f"{__package__}.trainer_classes"] * 3
_accelerators, _plugins, _strategies = (importlib.import_module(module) for module in _modules)

HPUAccelerator: Any = _accelerators.HPUAccelerator
HPUPrecisionPlugin: Any = _plugins.HPUPrecisionPlugin
SingleHPUStrategy: Any = _strategies.SingleHPUStrategy
HPUParallelStrategy: Any = _strategies.HPUParallelStrategy
HPUDDPStrategy: Any = getattr(_strategies, "HPUDDPStrategy", HPUParallelStrategy)


def __getattr__(name: str) -> bool:
    if name == "HPU_AVAILABLE":  # computed on access: another device map may be active the next time
        return bool(HPUAccelerator.is_available())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
