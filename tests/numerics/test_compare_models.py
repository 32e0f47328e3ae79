"""hmp.compare() on real models: the loss and the gradients are, bit by bit, those of a run without it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of transformers")

import hmp
from model_zoo.kit import Model, build, feed, forward, gradients, loss_of, seed_all
from model_zoo.selection import each

# Slices that overlap: backward adds their gradients up in bfloat16, and that is nearly all of what is lost.
BEYOND_LISTS = {"longformer": "nothing to move to the FP32 list: no list changes what rounds most, getitem (99%)"}


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
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: found.__setitem__(name, p.grad.detach().clone()))
    seed_all(2)
    comparison = hmp.compare(built, batch, "habana", loss=loss_of)
    assert comparison.loss_value == loss.item()
    for name, gradient in wanted.items():
        assert (gradient is None) == (name not in found)
        if gradient is not None and ".lstm." in name:
            # a comparison watches by a dispatch mode, under which the steps of a recurrent op are not summed in float32 (R21)
            assert (gradient - found[name]).norm() <= 2 * torch.finfo(torch.bfloat16).eps * gradient.norm(), name
        else:
            assert gradient is None or torch.equal(gradient, found[name]), name
    assert all(r.isolated is not None for r in comparison.rows if r.aten != "mkldnn_rnn_layer_backward")
    assert bool(comparison.advice) == (model.name not in BEYOND_LISTS) and comparison.gradient > 0
    if model.name in BEYOND_LISTS:
        assert str(comparison).endswith(BEYOND_LISTS[model.name])
