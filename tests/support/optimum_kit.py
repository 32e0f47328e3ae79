"""What the tests of transformers' Trainer and of the stand-ins for optimum.habana train: a small BERT on random tokens.

The tests run on each release of transformers that .ci/releases names.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer

ON_CPU = {"use_cpu": True}


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


def differ(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether a parameter has two values: losses are logged with four digits by releases before 5."""
    return any(not torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def assert_trained_alike(ours: Trainer, own: Trainer, exact: Trainer) -> None:
    """The two have the same losses and, bit for bit, weights in float32; and they are others than those of the third."""
    assert losses(ours) == losses(own)
    assert differ(own.model, exact.model)
    for mine, theirs in zip(ours.model.parameters(), own.model.parameters(), strict=True):
        assert mine.dtype is torch.float32
        assert torch.equal(mine, theirs)
