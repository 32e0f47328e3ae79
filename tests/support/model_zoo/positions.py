"""Long sequences: what a decoder says at positions beyond 1,000, where bfloat16 cannot tell neighbours apart."""

from __future__ import annotations

from typing import Any

import torch

from . import FAMILIES, MODELS
from .kit import Batch, Model, build, cosine, make_config, seed_all
from .sizes import LOUD

LENGTH, FAR = 1152, 1001
ROOM = 2048

# ALiBi, sinusoids, tables and rotations of every kind. Not here: recurrences without positions, and encoders whose positions
# are a table that is looked up.
WITH_POSITIONS = (
    *(model.name for model in FAMILIES["decoders"]),
    *(model.name for model in FAMILIES["mixtures of experts"]),
    *("recurrent-gemma", "modernbert", "deberta-v2"),
)


def build_long(model: Model) -> torch.nn.Module:
    """The model with room for long sequences, and attention so sharp that its output hangs on every position."""
    config = make_config(model)
    changes: dict[str, Any] = {"max_position_embeddings": ROOM}
    changes |= {name: ROOM for name in ("n_positions", "max_seq_len") if hasattr(config, name)}
    changes |= {name: ROOM for name in ("sliding_window",) if name in model.config}
    changes[[name for name in LOUD if getattr(config, name, None) is not None][-1]] = 0.4  # Funnel's initializer_std, not its range
    return build(model, **changes).eval()


def long_batch(model: Model) -> Batch:
    seed_all(model.seed + 1)
    return {"input_ids": torch.randint(5, 90, (1, LENGTH))}


def far_logits(built: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The logits at positions beyond 1,000, less what they have in common, which says nothing about positions."""
    with torch.no_grad():
        logits = built(**batch).logits[0, FAR:].double()
    return logits - logits.mean(0)


def likeness(built: torch.nn.Module, batch: Batch, exact: torch.Tensor) -> float:
    """The cosine of the far logits with float32's."""
    return cosine(far_logits(built, batch), exact)


assert set(WITH_POSITIONS) <= set(MODELS)
