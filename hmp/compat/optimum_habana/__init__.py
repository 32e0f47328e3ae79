"""Scripts of Optimum's guide to Gaudi run on any device: `optimum.habana` has thin classes over transformers' own.

transformers is imported when a script asks for a name. This was not run on Gaudi hardware.
"""

from __future__ import annotations

import sys
import types

import torch

from ..habana.replacements import AttributeReplacements
from ..import_finders import after_import
from ..import_shim import ImportShim

_ARGUMENTS = dict.fromkeys(("GaudiTrainingArguments", "GaudiSeq2SeqTrainingArguments"), f"{__name__}.arguments")
_TRAINERS = dict.fromkeys(("GaudiTrainer", "GaudiSeq2SeqTrainer"), f"{__name__}.trainer")
_CONFIGURATION = {"GaudiConfig": f"{__name__}.configuration"}
_ALL = {**_CONFIGURATION, **_TRAINERS, **_ARGUMENTS}
_TREE = {
    "optimum.habana": _ALL,
    "optimum.habana.transformers": _ALL,
    "optimum.habana.transformers.gaudi_configuration": {**_CONFIGURATION, "GAUDI_CONFIG_NAME": f"{__name__}.configuration"},
    "optimum.habana.transformers.trainer": _TRAINERS,
    "optimum.habana.transformers.trainer_seq2seq": _TRAINERS,
    "optimum.habana.transformers.training_args": _ARGUMENTS,
    "optimum.habana.transformers.training_args_seq2seq": _ARGUMENTS,
    "optimum.habana.utils": dict.fromkeys(("get_hpu_memory_stats", "set_seed"), f"{__name__}.trainer"),
}

_shim = ImportShim(_TREE, "Use transformers' own, or install optimum-habana and the transformers that it was made for")


def install(replaced: AttributeReplacements) -> None:
    """Make `optimum.habana` importable until `replaced.undo()`."""
    _shim.install()
    replaced.on_undo(_shim.uninstall)


_IMPORT_UTILS = "transformers.utils.import_utils"


def keep_torch_unpatched(replaced: AttributeReplacements) -> None:
    """Keep transformers from patching torch for Gaudi, until `replaced.undo()`. Called before torch has an "hpu".

    transformers patches torch when its is_torch_hpu_available() first finds an "hpu", which importing transformers does. These patches
    would outlive the shim, and its torch.compile asks for a backend that only Habana has.
    """
    imported = sys.modules.get(_IMPORT_UTILS)
    if imported is None:
        replaced.on_undo(after_import(_IMPORT_UTILS, _replace_availability))
    elif hasattr(imported, "is_torch_hpu_available"):
        imported.is_torch_hpu_available()  # it caches its result: no "hpu", and nothing to patch


def is_torch_hpu_available() -> bool:
    """Return True if "hpu" is mapped to a device."""
    hpu = getattr(torch, "hpu", None)
    return hpu is not None and bool(hpu.is_available())


def _replace_availability(module: types.ModuleType) -> None:
    vars(module)["is_torch_hpu_available"] = is_torch_hpu_available
