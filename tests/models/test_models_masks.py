"""Padding changes nothing under a policy: not on the right, not on the left, and a row that is masked throughout is not NaN."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import torch

from model_zoo.kit import Model, converted
from model_zoo.masking import TEXT_MODELS, alone, build_for_text, distance, padded, with_a_masked_row
from model_zoo.selection import POLICIES, each

# Padding moves a sentence to other places of a vector register and other chunks of a scan, which round sums otherwise.
EXACT, ROUNDED = 1e-5, 0.03
# Models of which this cannot be asked, because padding changes what they say in plain float32 torch as well. (Nystromformer is not
# asked at all: in transformers 5.23 it takes no mask.)
CANNOT_PAD = {
    "fnet": "it has no mask",
    "funnel": "it pools pairs of tokens, padding among them",
    "convbert": "its convolution sees padding",
    "canine": "it says one thing of a whole row, and downsamples padding with the rest",
    "perceiver": "it takes one length only",
}
# On the left: positions cannot be given, or count from elsewhere than zero.
CANNOT_PAD_LEFT = {"longformer", "reformer", "rwkv", "recurrent-gemma", "longt5", "bart", "led", "m2m-100", "prophetnet", "nllb-moe"}
# The model itself casts a mask of finfo(float32).min to the dtype of its scores, which torch.autocast makes bfloat16 as well.
OVERFLOWS_ITSELF = {("canine", "torch-cpu")}


@pytest.mark.slow
@pytest.mark.parametrize("model", each([name for name in TEXT_MODELS if name != "nystromformer"], quick=("bert", "llama", "t5")))
def test_padding_changes_nothing_and_a_masked_row_is_as_finite_as_in_float32(model: Model):
    built = build_for_text(model)
    sides = [] if model.name in CANNOT_PAD else ["right", "left"]
    exact = {side: distance(padded(built, side), alone(built)) for side in sides}
    assert {side for side in sides if exact[side] > EXACT} == ({"left"} if model.name in CANNOT_PAD_LEFT else set()), exact
    assert bool(torch.isfinite(with_a_masked_row(built)).all())
    for policy in POLICIES:
        with converted(policy):
            moved = {side: distance(padded(built, side), alone(built)) for side in sides if exact[side] < EXACT}
            finite = bool(torch.isfinite(with_a_masked_row(built)).all())
        assert all(far < ROUNDED for far in moved.values()), (policy, moved)
        assert finite == ((model.name, policy) not in OVERFLOWS_ITSELF), policy
