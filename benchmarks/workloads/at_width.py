"""Seven models by their width, for the bytes that a step saves for backward: four blocks of each text model, one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import models
from .models import Batch, Case

_LENGTH, _PIXELS = 128, 96
NAMES = ("bert", "gpt2", "vit", "t5", "llama", "resnet", "unet")


def build(name: str, width: int, rows: int, seed: int = 0) -> Case:
    """Return the model in training mode with its batch of `rows` rows."""
    torch.manual_seed(seed)
    model, batch = _MAKE[name](width, rows)
    return Case(name, str(width), model.train(), batch, computes_loss=name not in ("resnet", "unet"))


def _llama(width: int, rows: int) -> tuple[nn.Module, Batch]:
    model = models.of_transformers(
        "LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=max(width * 8 // 3 // 64, 1) * 64,
        max_position_embeddings=_LENGTH,
        use_cache=False,
    )
    tokens = models._tokens(rows, _LENGTH, 1000)
    return model, {"input_ids": tokens, "labels": tokens}


_MAKE: dict[str, Callable[[int, int], tuple[nn.Module, Any]]] = {
    "bert": lambda width, rows: models._bert(width, 4, rows, _LENGTH),
    "gpt2": lambda width, rows: models._gpt2(width, 4, rows, _LENGTH),
    "vit": lambda width, rows: models._vit(width, 4, rows, _PIXELS, 8),
    "t5": lambda width, rows: models._t5(width, 2, rows, _LENGTH),
    "llama": _llama,
    "resnet": lambda width, rows: models._resnet(width // 4, (1, 1, 1), rows, 32),
    "unet": lambda width, rows: models._unet(width // 8, 2, max(rows // 2, 1), 64),
}
