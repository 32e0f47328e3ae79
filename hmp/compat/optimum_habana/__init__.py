"""`optimum.habana` where Optimum's package for Gaudi is not: its names, as thin classes over transformers' own.

Reached by `hmp.compat.habana.install()` or `hmp run --habana`; nothing of this was run on Gaudi hardware.
"""

from __future__ import annotations

from .. import transformers  # noqa: F401  # first: it says what to install where transformers is not
from .arguments import GaudiSeq2SeqTrainingArguments, GaudiTrainingArguments
from .configuration import GaudiConfig
from .trainer import GaudiSeq2SeqTrainer, GaudiTrainer

__all__ = ["GaudiConfig", "GaudiSeq2SeqTrainer", "GaudiSeq2SeqTrainingArguments", "GaudiTrainer", "GaudiTrainingArguments"]
