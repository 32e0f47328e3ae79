"""Tiny random models of transformers: what they are, how they are fed and trained, and what is checked about them.

Importing this package imports transformers; tests ask `pytest.importorskip("transformers")` first.
"""

from __future__ import annotations

from .audio import AUDIO
from .decoders import DECODERS
from .encoders import ENCODERS
from .kit import Model
from .mixtures import MIXTURES
from .multimodal import MULTIMODAL
from .recurrent import RECURRENT
from .seq2seq import SEQ2SEQ
from .vision import VISIONS

FAMILIES: dict[str, tuple[Model, ...]] = {
    "encoders": ENCODERS,
    "decoders": DECODERS,
    "mixtures of experts": MIXTURES,
    "state spaces and recurrences": RECURRENT,
    "encoder-decoders": SEQ2SEQ,
    "vision": VISIONS,
    "audio": AUDIO,
    "multi-modal": MULTIMODAL,
}
MODELS: dict[str, Model] = {model.name: model for family in FAMILIES.values() for model in family}
