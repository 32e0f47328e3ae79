"""On real models: compare() leaves loss and gradients, bit by bit, those of a run without it; healthy ones have no finding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of transformers")

import hmp
from model_zoo import MODELS
from model_zoo.kit import Model, build, feed, forward, gradients, loss_of, seed_all
from model_zoo.selection import each


@pytest.mark.slow
@pytest.mark.parametrize("model", each(quick=("bert", "mixtral", "resnet")))
def test_a_comparison_runs_as_the_model_does_without_it(model: Model):
    built = build(model)
    batch = feed(model, built)
    with hmp.casts("habana"):
        output = forward(built, batch)
        loss = loss_of(output)
        loss.backward()
    wanted, found = gradients(built), {}
    for name, parameter in built.named_parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: found.setdefault(name, []).append(p.grad.detach().clone()))
    seed_all(2)
    comparison = hmp.compare(built, batch, "habana", loss=loss_of, trials=0)
    assert comparison.loss_value == loss.item()
    for name, gradient in wanted.items():
        assert (gradient is None) == (name not in found)
        if gradient is None:
            continue
        watched, measured = found[name][-2:]  # each op beside float32, and the step whose errors are told
        assert torch.equal(gradient, measured), name
        if ".lstm." in name:
            # a comparison watches by a dispatch mode, under which the steps of a recurrent op are not summed in float32 (R21)
            assert (gradient - watched).norm() <= 2 * torch.finfo(torch.bfloat16).eps * gradient.norm(), name
        else:
            assert torch.equal(gradient, watched), name
    assert all(r.isolated is not None for r in comparison.rows if r.aten != "mkldnn_rnn_layer_backward")
    assert comparison.gradient > 0


def half() -> hmp.Policy:
    return hmp.Policy.load("autocast").replace(dtype="float16")


def some(*names: str, nightly: tuple[str, ...]) -> list[object]:
    return [*names, *(pytest.param(name, marks=pytest.mark.nightly) for name in nightly)]


@pytest.mark.slow
@pytest.mark.parametrize("name", some("bert", "t5", nightly=("llama", "mixtral", "resnet", "mamba2", "vit", "gpt2", "whisper", "clip")))
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
