"""The cost of tools: a training step of BERT-base under hmp.record(), and hmp.compare() of a small BERT, each against the same step
without."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

import hmp

from ..harness.results import Found, at_most
from ..harness.sides import rotated
from ..harness.stats import paired_ratio
from ..harness.timing import step_seconds

POLICY, TARGET = "habana", 1.3
SEQUENCES, TOKENS = 1, 32
# of transformers' BertConfig, whose own values are BERT-base's
SMALLEST = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 128}


# the BERT that is compared
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 1000}


def run(rounds: int, device: str, smallest: bool = False) -> Found:
    """Return the row about a recorded step."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(**(SMALLEST if smallest else {}))
    model = BertForSequenceClassification(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, config.vocab_size, (SEQUENCES, TOKENS), device=device)
    labels = torch.arange(SEQUENCES, device=device) % 2

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()

    samples: dict[str, list[float]] = {"plain": [], "recorded": []}
    calls = 0
    with hmp.convert(policy=POLICY):
        for number in range(rounds):
            for name in rotated(list(samples), number):
                if name == "plain":
                    samples[name].append(step_seconds(step, 1, device))
                    continue
                with hmp.record() as report:
                    samples[name].append(step_seconds(step, 1, device))
                calls = sum(row.calls for row in report.rows)
    ratio = paired_ratio(samples["recorded"], samples["plain"])
    found = Found("recording")
    plain, recorded = (1000 * median(samples[name]) for name in ("plain", "recorded"))
    found.details = [
        f"training step of BERT-base, {SEQUENCES} x {TOKENS} tokens, policy {POLICY}, ms, medians of {rounds} rounds",
        f"unwatched {plain:.1f}, recorded {recorded:.1f}; {calls} calls noted in two steps",
    ]
    values: dict[str, Any] = dict(samples)
    found.samples = values
    found.details.append(_compared(rounds, device, smallest))
    found.rows = [at_most("training step of BERT-base, recorded / unwatched", TARGET, ratio, ratio.text())]
    return found


def _compared(rounds: int, device: str, smallest: bool) -> str:
    """Return a line with the time of a comparison over that of forward and backward under its policy."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**(SMALLEST if smallest else SMALL))).to(device)
    tokens = torch.randint(0, 128 if smallest else 1000, (4, 64), device=device)
    batch = {"input_ids": tokens, "labels": tokens}

    def step() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    samples: dict[str, list[float]] = {"step": [], "compared": []}
    for number in range(rounds):
        for name in rotated(list(samples), number):
            if name == "compared":
                samples[name].append(step_seconds(lambda: hmp.compare(model, batch, POLICY), 1, device))
                continue
            with hmp.casts(POLICY):
                step()
                samples[name].append(step_seconds(step, 3, device))
    ratio = paired_ratio(samples["compared"], samples["step"])
    plain, compared = (1000 * median(samples[name]) for name in samples)
    of = f"hmp.compare() of a BERT of width {model.config.hidden_size}, 4 x 64 tokens, ms"
    return f"{of}: forward and backward {plain:.1f}, compared {compared:.1f}, {ratio.text()} times as long"
