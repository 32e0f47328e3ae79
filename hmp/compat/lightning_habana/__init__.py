"""Scripts that Lightning's guide to Gaudi shows run on any device: `lightning_habana` is answered here, and Lightning knows "hpu".

Thin classes over Lightning's own, of whichever of `lightning` and `pytorch_lightning` the script imports; neither is imported for it.
Lightning 1.6 to 2.0 has Gaudi itself: there its own classes run, over hmp's `habana_frameworks`, and only what a later torch has changed is
mended.
"""

from __future__ import annotations

import functools
import sys
import types

from ..habana import modules
from ..habana.replacements import Replacements
from ..import_finders import after_import
from ..lightning_homes import HOMES, has_gaudi
from ..stand_in import StandIn
from . import mended
from .connector import register, take_hpu

_NAMES = f"{__name__}.names"
_ACCELERATOR = {"HPUAccelerator": _NAMES}
_PRECISION = {"HPUPrecisionPlugin": _NAMES}
_STRATEGIES = dict.fromkeys(("HPUDDPStrategy", "HPUParallelStrategy", "SingleHPUStrategy"), _NAMES)
_ALL = {**_STRATEGIES, **_ACCELERATOR, **_PRECISION}
_TREE = {
    "lightning_habana": {**_ALL, "HPU_AVAILABLE": _NAMES},
    "lightning_habana.pytorch": _ALL,
    "lightning_habana.pytorch.accelerator": _ACCELERATOR,
    "lightning_habana.pytorch.plugins": _PRECISION,
    "lightning_habana.pytorch.plugins.precision": _PRECISION,
    "lightning_habana.pytorch.strategies": _STRATEGIES,
    "lightning_habana.pytorch.strategies.ddp": {"HPUDDPStrategy": _NAMES},
    "lightning_habana.pytorch.strategies.parallel": {"HPUParallelStrategy": _NAMES},
    "lightning_habana.pytorch.strategies.single": {"SingleHPUStrategy": _NAMES},
}
_REMEDY = "Take what Lightning itself has for it, or install lightning-habana 1.6 with lightning 2.3, which it was made for"

_CONNECTOR = "trainer.connectors.accelerator_connector"

_stand_in = StandIn(_TREE, _REMEDY, trying=modules.with_media)


def install(replaced: Replacements) -> None:
    """Makes `lightning_habana` importable and "hpu" an accelerator of Lightning's Trainer, until `replaced.undo()`."""
    _stand_in.install(functools.partial(_register, replaced))
    replaced.on_undo(_stand_in.uninstall)
    for home in HOMES:
        replaced.on_undo(after_import(f"{home}.{_CONNECTOR}", functools.partial(_take_hpu, replaced, home)))
    mended.install(replaced)
    replaced.on_undo(after_import("lightning_habana.utils.resources", functools.partial(_tell_release, replaced)))


def _register(replaced: Replacements) -> None:
    for home in HOMES:
        connector = sys.modules.get(f"{home}.{_CONNECTOR}")
        if connector is not None and not has_gaudi(home):
            register(connector, replaced)


def _take_hpu(replaced: Replacements, home: str, connector: types.ModuleType) -> None:
    if not has_gaudi(home):
        take_hpu(connector, is_ours=_stand_in.is_used, replaced=replaced)


def _tell_release(replaced: Replacements, resources: types.ModuleType) -> None:
    """The package itself asks a program of Habana's driver for the release, and refuses its precision plugin without an answer."""
    # the last one before 1.14, from which on the package imports Habana's FP8 engine
    replaced.put(resources, "get_hpu_synapse_version", lambda: "1.13.0")
