"""Scripts of Lightning's guide to Gaudi run on any device: `lightning_habana` is importable, and Lightning's Trainer takes "hpu".

The classes are thin ones over Lightning's own, of whichever of `lightning` and `pytorch_lightning` the script imports; neither is imported
for it. Lightning 1.8 to 2.0 supports Gaudi itself: there its own classes run on hmp's `habana_frameworks`, with the patches that a later
torch needs.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

from ..habana.replacements import AttributeReplacements
from ..import_finders import after_import
from ..import_shim import ImportShim
from ..lightning_packages import PACKAGES, SHIM, has_gaudi, installed, preferred
from .trainer_patches import accept_hpu, patch_broadcast

_ACCELERATOR = {"HPUAccelerator": __name__}
_PRECISION = {"HPUPrecisionPlugin": __name__}
_STRATEGIES = dict.fromkeys(("HPUDDPStrategy", "HPUParallelStrategy", "SingleHPUStrategy"), __name__)
_ALL = {**_STRATEGIES, **_ACCELERATOR, **_PRECISION}
_TREE = {
    "lightning_habana": {**_ALL, "HPU_AVAILABLE": __name__},
    "lightning_habana.pytorch": _ALL,
    "lightning_habana.pytorch.accelerator": _ACCELERATOR,
    "lightning_habana.pytorch.plugins": _PRECISION,
    "lightning_habana.pytorch.plugins.precision": _PRECISION,
    "lightning_habana.pytorch.strategies": _STRATEGIES,
    "lightning_habana.pytorch.strategies.ddp": {"HPUDDPStrategy": __name__},
    "lightning_habana.pytorch.strategies.parallel": {"HPUParallelStrategy": __name__},
    "lightning_habana.pytorch.strategies.single": {"SingleHPUStrategy": __name__},
}

_shim = ImportShim(_TREE, "Use Lightning's own")


def install(replaced: AttributeReplacements) -> None:
    """Make `lightning_habana` importable and "hpu" an accelerator of Lightning's Trainer, until `replaced.undo()`."""
    _shim.install()
    replaced.on_undo(_shim.uninstall)
    for package in PACKAGES:
        for name, then in (
            ("trainer.connectors.accelerator_connector", functools.partial(_accept_hpu, replaced, package)),
            ("strategies.hpu_parallel", functools.partial(patch_broadcast, replaced)),  # of releases 1.8 to 2.0
        ):
            replaced.on_undo(after_import(f"{package}.{name}", then))


def _accept_hpu(replaced: AttributeReplacements, package: str, connector: types.ModuleType) -> None:
    if not has_gaudi(package):
        accept_hpu(connector, is_ours=_shim.is_used, replaced=replaced)


@functools.cache
def _sources() -> dict[str, Any]:
    """Return each name of `lightning_habana` → the module that has it: hmp's, or one of Lightning 1.8 to 2.0, which has it itself."""
    package = preferred(installed(SHIM))  # before anything here imports the other package
    if not has_gaudi(package):
        classes = importlib.import_module(f"{__name__}.trainer_classes")
        strategies = types.SimpleNamespace(**{each.__name__: each for each in classes.strategies_of(package)})
        return dict.fromkeys(_ALL, classes) | dict.fromkeys(_STRATEGIES, strategies)
    homes = {"accelerators": _ACCELERATOR, "plugins": _PRECISION, "strategies": _STRATEGIES}
    return {name: importlib.import_module(f"{package}.{home}") for home, names in homes.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return what `lightning_habana` has by that name."""
    if name == "HPU_AVAILABLE":  # computed on access: another device map may be active the next time
        return bool(__getattr__("HPUAccelerator").is_available())
    if name not in _ALL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source = _sources()[name]
    return getattr(source, name, None) or source.HPUParallelStrategy  # HPUDDPStrategy is its newer name
