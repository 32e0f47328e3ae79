"""GaudiTrainer beside transformers' own: the same numbers where the lists are torch's, the configuration's casts and optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hmp
from hmp.compat.habana.optimizers import FusedAdamW
from optimum_kit import ON_CPU, examples, losses, model, settings

BF16, F32 = torch.bfloat16, torch.float32


pytestmark = pytest.mark.usefixtures("hpu_on_cpu", "accelerates_precision")


def gaudi(folder: Path, config: dict[str, Any], **more: Any) -> Any:
    from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments

    arguments = GaudiTrainingArguments(str(folder), use_habana=True, use_lazy_mode=True, **settings(**more))
    return GaudiTrainer(model(), GaudiConfig(**config), args=arguments, train_dataset=examples(), eval_dataset=examples())


def plain(folder: Path, *, of: Any = None, **more: Any) -> Trainer:
    arguments = TrainingArguments(str(folder), **ON_CPU, **settings(**more))
    return Trainer(of or model(), arguments, train_dataset=examples(), eval_dataset=examples())


def lists_of_torch() -> dict[str, Any]:
    own = hmp.Policy.load("torch-cpu")
    return {"use_habana_mixed_precision": True, "hmp_bf16_ops": own.entries("bf16"), "hmp_fp32_ops": own.entries("fp32")}


def test_the_logged_speed_is_that_of_the_steps_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmp.compat.optimum_habana.trainer.perf_counter", iter((1.0, 3.0)).__next__)  # after it, and at the end
    ours = gaudi(tmp_path, {}, max_steps=4, throughput_warmup_steps=3)
    ours.train()
    assert ours.state.log_history[-1]["train_steps_per_second"] == 0.5


@pytest.mark.slow
def test_use_fused_adam_is_habanas_adam_with_an_epsilon_of_1e_6(tmp_path: Path) -> None:
    from optimum.habana import GaudiTrainingArguments

    assert GaudiTrainingArguments(str(tmp_path), **ON_CPU).adam_epsilon == 1e-6
    ours = gaudi(tmp_path, {"use_fused_adam": True, "use_fused_clip_norm": True}, weight_decay=0.1, max_grad_norm=0.05)
    before = copy.deepcopy(ours.model)
    ours.train()
    used = ours.optimizer.optimizer  # within accelerate's
    assert isinstance(used, FusedAdamW)
    assert {group["eps"] for group in used.param_groups} == {1e-6}
    assert [group["weight_decay"] for group in used.param_groups] == [0.1, 0.0]
    # transformers' own, in plain float32: the same parameters decay, the same norm is clipped
    own = plain(tmp_path, of=before, weight_decay=0.1, max_grad_norm=0.05, optim="adamw_torch")
    own.train()
    for mine, theirs in zip(ours.model.parameters(), own.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    norms = [entry["grad_norm"] for entry in ours.state.log_history if "grad_norm" in entry]
    assert norms == pytest.approx([entry["grad_norm"] for entry in own.state.log_history if "grad_norm" in entry], rel=1e-4)


@pytest.mark.native_kernels
@pytest.mark.slow
def test_checkpoints_are_plain_transformers_and_go_both_ways(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    whole = gaudi(tmp_path / "whole", lists_of_torch(), save_strategy="steps", save_steps=2)
    whole.train()
    kept = tmp_path / "whole" / "checkpoint-2"
    loaded = AutoModelForSequenceClassification.from_pretrained(kept)
    assert {tensor.dtype for tensor in loaded.parameters()} == {F32}

    # plain transformers goes on from it, and so does the stand-in from one of plain transformers: as if nothing had happened
    on = plain(tmp_path / "plain", bf16=True, save_strategy="steps", save_steps=2)
    on.train(resume_from_checkpoint=str(kept))
    assert losses(on) == losses(whole)
    own = plain(tmp_path / "own", bf16=True, save_strategy="steps", save_steps=2)
    own.train()
    back = gaudi(tmp_path / "back", lists_of_torch())
    back.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-2"))
    assert losses(back) == losses(own)
    for mine, theirs in zip(back.model.parameters(), on.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_missing_is_told_with_what_to_give(tmp_path: Path) -> None:
    from optimum.habana import GaudiTrainer, GaudiTrainingArguments

    with pytest.raises(hmp.HmpError, match=r"expected args= to be GaudiTrainingArguments, got TrainingArguments"):
        GaudiTrainer(model=model(), args=TrainingArguments(str(tmp_path), **ON_CPU))
    with pytest.raises(hmp.HmpError, match=r"expected a Gaudi configuration, got none; pass gaudi_config=GaudiConfig\(\.\.\.\)"):
        GaudiTrainer(model=model(), args=GaudiTrainingArguments(str(tmp_path), use_habana=True))
