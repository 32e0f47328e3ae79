"""Scripts that Lightning's guide to Gaudi shows run on any device: `lightning_habana` is answered here, and Lightning knows "hpu".

Thin classes over Lightning's own, of whichever of `lightning` and `pytorch_lightning` the script imports; neither is imported for it.
"""

from __future__ import annotations

import functools
import sys
import types

from ..after_import import after_import
from ..habana import modules
from ..habana.replacements import Replacements
from ..stand_in import StandIn
from .connector import register, take_hpu
from .homes import HOMES

__all__ = ["install"]

_ACCELERATOR = {"HPUAccelerator": f"{__name__}.accelerator"}
_PRECISION = {"HPUPrecisionPlugin": f"{__name__}.precision"}
_STRATEGIES = dict.fromkeys(("HPUDDPStrategy", "HPUParallelStrategy", "SingleHPUStrategy"), f"{__name__}.strategies")
_ALL = {**_STRATEGIES, **_ACCELERATOR, **_PRECISION}  # the strategies first: they look which Lightning the script has imported
_TREE = {
    "lightning_habana": {**_ALL, "HPU_AVAILABLE": f"{__name__}.accelerator"},
    "lightning_habana.pytorch": _ALL,
    "lightning_habana.pytorch.accelerator": _ACCELERATOR,
    "lightning_habana.pytorch.plugins": _PRECISION,
    "lightning_habana.pytorch.plugins.precision": _PRECISION,
    "lightning_habana.pytorch.strategies": _STRATEGIES,
    "lightning_habana.pytorch.strategies.ddp": {"HPUDDPStrategy": _STRATEGIES["HPUDDPStrategy"]},
    "lightning_habana.pytorch.strategies.parallel": {"HPUParallelStrategy": _STRATEGIES["HPUParallelStrategy"]},
    "lightning_habana.pytorch.strategies.single": {"SingleHPUStrategy": _STRATEGIES["SingleHPUStrategy"]},
}
_REMEDY = "Take what Lightning itself has for it, or install lightning-habana 1.6 with lightning 2.3, which it was made for"

_CONNECTORS = [f"{home}.trainer.connectors.accelerator_connector" for home in HOMES]

_stand_in = StandIn(_TREE, _REMEDY, trying=modules.with_media)


def install(replaced: Replacements) -> None:
    """Makes `lightning_habana` importable and "hpu" an accelerator of Lightning's Trainer, until `replaced.undo()`."""
    _stand_in.install(functools.partial(_register, replaced))
    replaced.on_undo(_stand_in.uninstall)
    for name in _CONNECTORS:
        replaced.on_undo(after_import(name, functools.partial(take_hpu, is_ours=_stand_in.is_used, replaced=replaced)))
    replaced.on_undo(after_import("lightning_habana.utils.resources", functools.partial(_tell_release, replaced)))


def _register(replaced: Replacements) -> None:
    for name in _CONNECTORS:
        if name in sys.modules:
            register(sys.modules[name], replaced)


def _tell_release(replaced: Replacements, resources: types.ModuleType) -> None:
    """The package itself asks a program of Habana's driver for the release, and refuses its precision plugin without an answer."""
    # the last one before 1.14, from which on the package imports Habana's FP8 engine
    replaced.put(resources, "get_hpu_synapse_version", lambda: "1.13.0")
