"""Scripts of Lightning's guide to Gaudi run on any device: `lightning_habana` is importable, and Lightning's Trainer takes "hpu".

The classes are thin ones over Lightning's own, of whichever of `lightning` and `pytorch_lightning` the script imports; neither is imported
for it. Lightning 1.6 to 2.0 supports Gaudi itself: there its own classes run on hmp's `habana_frameworks`, with the patches that a later
torch needs.
"""

from __future__ import annotations

import functools
import sys
import types

from ..habana.replacements import Replacements
from ..import_finders import after_import
from ..import_shim import ImportShim
from ..lightning_packages import PACKAGES, has_gaudi
from .trainer_patches import accept_hpu, patch_old_releases, register

_EXPORTS = f"{__name__}.exports"
_ACCELERATOR = {"HPUAccelerator": _EXPORTS}
_PRECISION = {"HPUPrecisionPlugin": _EXPORTS}
_STRATEGIES = dict.fromkeys(("HPUDDPStrategy", "HPUParallelStrategy", "SingleHPUStrategy"), _EXPORTS)
_ALL = {**_STRATEGIES, **_ACCELERATOR, **_PRECISION}
_TREE = {
    "lightning_habana": {**_ALL, "HPU_AVAILABLE": _EXPORTS},
    "lightning_habana.pytorch": _ALL,
    "lightning_habana.pytorch.accelerator": _ACCELERATOR,
    "lightning_habana.pytorch.plugins": _PRECISION,
    "lightning_habana.pytorch.plugins.precision": _PRECISION,
    "lightning_habana.pytorch.strategies": _STRATEGIES,
    "lightning_habana.pytorch.strategies.ddp": {"HPUDDPStrategy": _EXPORTS},
    "lightning_habana.pytorch.strategies.parallel": {"HPUParallelStrategy": _EXPORTS},
    "lightning_habana.pytorch.strategies.single": {"SingleHPUStrategy": _EXPORTS},
}
_REMEDY = "Use Lightning's own"

_CONNECTOR = "trainer.connectors.accelerator_connector"

_shim = ImportShim(_TREE, _REMEDY)


def install(replaced: Replacements) -> None:
    """Make `lightning_habana` importable and "hpu" an accelerator of Lightning's Trainer, until `replaced.undo()`."""
    _shim.install(functools.partial(_register, replaced))
    replaced.on_undo(_shim.uninstall)
    for package in PACKAGES:
        replaced.on_undo(after_import(f"{package}.{_CONNECTOR}", functools.partial(_accept_hpu, replaced, package)))
    patch_old_releases(replaced)


def _register(replaced: Replacements) -> None:
    for package in PACKAGES:
        connector = sys.modules.get(f"{package}.{_CONNECTOR}")
        if connector is not None and not has_gaudi(package):
            register(connector, replaced)


def _accept_hpu(replaced: Replacements, package: str, connector: types.ModuleType) -> None:
    if not has_gaudi(package):
        accept_hpu(connector, is_ours=_shim.is_used, replaced=replaced)
