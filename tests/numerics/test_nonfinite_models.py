"""hmp.detect_nonfinite() on healthy models: training, float16 with a GradScaler, and generation, without a finding."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of transformers")

import hmp
from model_zoo import MODELS
from model_zoo.kit import build, feed, forward, loss_of

TEN = ("bert", "llama", "mixtral", "t5", "resnet", "mamba2", "vit", "gpt2", "whisper", "clip")


def half() -> hmp.Policy:
    return hmp.Policy.load("autocast").replace(dtype="float16")


def each(names: tuple[str, ...], quick: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", each(TEN, ("bert", "t5", "mixtral")))
@pytest.mark.parametrize("precision", ["habana", "float16", "autocast float16"])
def test_a_healthy_model_trains_without_a_finding(name: str, precision: str):
    model = build(MODELS[name])
    batch = feed(MODELS[name], model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled="float16" in precision)
    casts = torch.autocast("cpu", torch.float16) if "autocast" in precision else hmp.casts("habana" if precision == "habana" else half())
    with hmp.detect_nonfinite() as findings:
        for _ in range(2):
            optimizer.zero_grad()
            with casts:
                loss = loss_of(forward(model, batch))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert findings == []


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", each(("llama", "gpt2", "t5", "bart"), ("llama",)))
@pytest.mark.parametrize("precision", [None, "float16"])
@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 5, "top_p": 0.8}, {"num_beams": 3}, {"do_sample": True, "typical_p": 0.9}])
def test_generation_has_no_finding(name: str, precision: str | None, how: dict[str, object]):
    model = build(MODELS[name]).eval()
    batch = feed(MODELS[name], model)
    with hmp.detect_nonfinite() as findings, hmp.casts(half()) if precision else contextlib.nullcontext():
        model.generate(batch["input_ids"], attention_mask=batch["attention_mask"].flip(1), max_new_tokens=4, pad_token_id=0, **how)
    assert findings == []


def test_an_overflow_planted_in_a_real_model_is_found():
    model = build(MODELS["bert"])
    batch = feed(MODELS["bert"], model)
    with torch.no_grad():
        model.bert.encoder.layer[1].intermediate.dense.weight.mul_(1e5)
    with pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite(), hmp.casts(half()):
        forward(model, batch)
    finding = caught.value.finding
    assert (finding.op, finding.module) == ("linear", "bert.encoder.layer.1.intermediate.dense")
    assert finding.file.endswith("modeling_bert.py")
    assert finding.remedy.startswith("policy = ")
