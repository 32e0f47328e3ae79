"""Padding: what a model says of a sentence alone, beside a longer one, and of a row that is masked from end to end."""

from __future__ import annotations

import inspect

import torch

from . import FAMILIES, MODELS
from .kit import Batch, Model, build, floats, seed_all

REAL, PADDING = 9, 3
TEXT_FAMILIES = ("encoders", "decoders", "mixtures of experts", "state spaces and recurrences", "encoder-decoders")
TEXT_MODELS = tuple(model.name for family in TEXT_FAMILIES for model in FAMILIES[family])


def build_for_text(model: Model) -> torch.nn.Module:
    return build(model).eval()


def sentences(built: torch.nn.Module) -> tuple[torch.Tensor, Batch]:
    """Two rows of tokens, and what a decoder is given besides."""
    seed_all(1)
    tokens = torch.randint(5, 90, (2, REAL + PADDING))
    rest = {"decoder_input_ids": torch.randint(5, 90, (1, 6))} if built.config.is_encoder_decoder else {}
    return tokens, rest


def said(built: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The logits."""
    with torch.no_grad():
        output = built(**batch)
    return floats(output.logits if hasattr(output, "logits") else output)[0].double()


def alone(built: torch.nn.Module) -> torch.Tensor:
    """What the model says of the shorter sentence by itself."""
    tokens, rest = sentences(built)
    return said(built, {"input_ids": tokens[1:, :REAL], "attention_mask": torch.ones(1, REAL, dtype=torch.long), **rest})[0]


def padded(built: torch.nn.Module, side: str) -> torch.Tensor:
    """What it says of the same sentence below a longer one, its padding on the right or on the left."""
    tokens, rest = sentences(built)
    mask = torch.ones(2, REAL + PADDING, dtype=torch.long)
    real = slice(0, REAL) if side == "right" else slice(PADDING, None)
    shorter = torch.full((REAL + PADDING,), 7)
    shorter[real] = tokens[1, :REAL]
    mask[1] = 0
    mask[1, real] = 1
    batch = {"input_ids": torch.stack([tokens[0], shorter]), "attention_mask": mask}
    batch |= {name: value.expand(2, -1) for name, value in rest.items()}
    if side == "left" and "position_ids" in inspect.signature(built.forward).parameters:
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return said(built, batch)[1] if rest else said(built, batch)[1, real]


def with_a_masked_row(built: torch.nn.Module) -> torch.Tensor:
    """What it says of two rows, the second of which is masked from end to end."""
    tokens, rest = sentences(built)
    mask = torch.ones_like(tokens)
    mask[1] = 0
    return said(built, {"input_ids": tokens, "attention_mask": mask, **{name: value.expand(2, -1) for name, value in rest.items()}})


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far apart, measured by the size of `b`."""
    return float((a - b).norm() / b.norm())


assert set(TEXT_MODELS) <= set(MODELS)
