"""What the tests of transformers' Trainer and of the stand-ins for optimum.habana train: a small BERT on random tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    return BertForSequenceClassification(config)


def examples(count: int = 16) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 99, (8,), generator=made), "labels": torch.tensor(i % 2)} for i in range(count)]


def settings(**more: Any) -> dict[str, Any]:
    """Arguments that both transformers' TrainingArguments and the stand-in's take, with the same meaning."""
    given = {
        "per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3,
        "adam_epsilon": 1e-6, "report_to": [], "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return given | more


def losses(trained: Trainer) -> list[float]:
    return [float(entry["loss"]) for entry in trained.state.log_history if "loss" in entry]
