"""HMPCallback scopes the model of transformers' own Trainer, in training, evaluation and prediction."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

import hmp
from hmp.compat.transformers import POLICY_FILE, HMPCallback
from optimum_kit import ON_CPU, assert_trained_alike, examples, losses, model, settings

BF16, F32 = torch.bfloat16, torch.float32


pytestmark = pytest.mark.usefixtures("accelerates_precision")


def trainer(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    made = TrainingArguments(str(folder), **ON_CPU, **settings(**arguments))
    return Trainer(model(), made, train_dataset=examples(), eval_dataset=examples(), callbacks=list(callbacks))


@pytest.mark.native_kernels
@pytest.mark.slow
def test_training_is_what_trainers_own_bf16_gives_under_torch_autocasts_lists(tmp_path: Path) -> None:
    plain = trainer(tmp_path)  # first: what bf16=True writes into the environment stays there
    plain.train()
    own = trainer(tmp_path, bf16=True)
    own.train()
    ours = trainer(tmp_path, HMPCallback("torch-cpu"))
    ours.train()
    assert_trained_alike(ours, own, plain)


@pytest.mark.slow
def test_every_way_of_calling_the_model_is_cast_and_gives_float32_and_what_runs_outside_is_not(tmp_path: Path) -> None:
    def step(*args: Any, **kwargs: Any) -> None:
        enabled.append(hmp.casts_enabled())
        outside.append(F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    enabled: list[bool] = []
    outside: list[torch.dtype] = []
    made = trainer(tmp_path, HMPCallback(), type("Step", (TrainerCallback,), {"on_pre_optimizer_step": step})())
    seen: list[torch.dtype] = []
    logits: list[torch.dtype] = []
    made.model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    made.model.register_forward_hook(lambda module, args, out: logits.append(out.logits.dtype))
    for call in (made.train, made.evaluate, lambda: made.predict(examples())):
        seen.clear()
        call()
        assert set(seen) == {BF16}
    assert set(logits) == {F32}
    assert enabled == [False] * 4 and set(outside) == {F32}


@pytest.mark.slow
def test_a_checkpoint_holds_the_policy_and_another_policy_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = hmp.Policy.load("habana").replace(name="mine", fp32=frozenset({"softmax", "gelu"}), bf16=frozenset({"linear"}))
    first = trainer(tmp_path, HMPCallback(policy), save_strategy="steps", save_steps=2)
    first.train()
    kept = tmp_path / "checkpoint-2"
    assert hmp.Policy.from_dict(json.loads((kept / POLICY_FILE).read_text())) == policy
    assert policy.fingerprint in (kept / "trainer_state.json").read_text()

    with caplog.at_level(logging.WARNING, "hmp"):
        same = trainer(tmp_path / "same", HMPCallback(policy))
        same.train(resume_from_checkpoint=str(kept))
    assert "expected the checkpoint's policy" not in caplog.text
    assert losses(same) == losses(first)

    with caplog.at_level(logging.WARNING, "hmp"):
        trainer(tmp_path / "other", HMPCallback("bert")).train(resume_from_checkpoint=str(kept))
    bert = hmp.Policy.load("bert")
    assert f"checkpoint's policy 'mine' ({policy.fingerprint}), got 'bert' ({bert.fingerprint})" in caplog.text
