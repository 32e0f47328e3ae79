"""What the models are fed: token ids with padding and labels, images, sound. Each takes the model's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Batch = dict[str, Any]
Feeder = Callable[[Any], Batch]


def ids(config: Any, rows: int, length: int) -> torch.Tensor:
    """Token ids without the first few, which are special."""
    known = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    return torch.randint(5, min(known, 90), (rows, length))


def right_padded(rows: int, length: int, missing: int = 3) -> torch.Tensor:
    """An attention mask whose last row ends early."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, length - missing :] = 0
    return mask


def causal(config: Any) -> Batch:
    tokens = ids(config, 2, 12)
    return {"input_ids": tokens, "attention_mask": right_padded(2, 12), "labels": tokens}


def masked(config: Any, length: int = 12) -> Batch:
    return {"input_ids": ids(config, 2, length), "attention_mask": right_padded(2, length), "labels": ids(config, 2, length)}


def seq2seq(config: Any, length: int = 12, target: int = 8) -> Batch:
    return {"input_ids": ids(config, 2, length), "attention_mask": right_padded(2, length), "labels": ids(config, 2, target)}


def images(size: int = 32, rows: int = 2, labels: bool = True) -> Feeder:
    def batch(config: Any) -> Batch:
        found: Batch = {"pixel_values": torch.randn(rows, 3, size, size)}
        return found | {"labels": torch.arange(rows) % 2} if labels else found

    return batch


def waves(config: Any) -> Batch:
    return {"input_values": torch.randn(2, 800), "labels": torch.randint(3, 19, (2, 5))}
