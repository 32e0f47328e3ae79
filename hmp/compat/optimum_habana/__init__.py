"""Scripts that Optimum's guide to Gaudi shows run on any device: `optimum.habana` is answered here, by thin classes over transformers' own.

transformers is imported when a script asks for a name. Nothing of this was run on Gaudi hardware.
"""

from __future__ import annotations

from ..habana.replacements import Replacements
from ..stand_in import StandIn

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
    "optimum.habana.utils": dict.fromkeys(("get_hpu_memory_stats", "set_seed"), f"{__name__}.statistics"),
}
_REMEDY = "Take transformers' own, or install optimum-habana and the transformers that it was made for"

_stand_in = StandIn(_TREE, _REMEDY)


def install(replaced: Replacements) -> None:
    """Makes `optimum.habana` importable until `replaced.undo()`."""
    _stand_in.install()
    replaced.on_undo(_stand_in.uninstall)
