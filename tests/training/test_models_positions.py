"""Decoders keep positions beyond 1,000 under the policies, and habana's list is known where it loses them; padding changes nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import torch

import hmp
from model_zoo import FAMILIES
from model_zoo.kit import Model, converted
from model_zoo.masking import TEXT_MODELS, alone, build_for_text, distance, padded, with_a_masked_row
from model_zoo.positions import WITH_POSITIONS, build_long, far_logits, likeness, long_batch
from model_zoo.selection import POLICIES, each

# The cosine of the logits beyond position 1,000 with float32's. Mixtures are lower: rounding sends some of 151 tokens to other
# experts; bfloat16 products alone, as torch.autocast makes them, cost some of them as much.
KEPT, KEPT_BY_MIXTURES = 0.97, 0.9
# `habana` holds `mul`, so `position * frequency` is rounded to eight bits and positions beyond 256 fall together (OPT without a
# mask multiplies the positions themselves). The figure is the cosine that was measured; plain float32 torch that is given the
# positions beyond 1,000 in bfloat16 is as far off. `habana` without `mul` keeps them.
HABANA_LOSES = {
    "gpt-neox": 0.88,
    "opt": 0.28,
    "llama": 0.35,
    "gemma2": 0.89,
    "qwen3": 0.95,
    "falcon": 0.88,
    "mixtral": 0.51,
    "qwen2-moe": 0.42,
    "deepseek-v3": 0.68,
    "gpt-oss": 0.22,
    "llama4": 0.7,
    "minimax": 0.45,
    "recurrent-gemma": 0.92,
    "falcon-h1": 0.8,
    "esm": 0.5,
    "modernbert": 0.63,
}
WITHOUT_MUL = "habana without mul"


def policy_of(name: str) -> str | hmp.Policy:
    if name != WITHOUT_MUL:
        return name
    habana = hmp.Policy.load("habana")
    return habana.replace(bf16=habana.bf16 - {"mul"})


@pytest.mark.slow
@pytest.mark.parametrize("model", each(WITH_POSITIONS, quick=("gpt2", "llama")))
def test_logits_beyond_a_thousand_positions_are_float32s(model: Model):
    built, batch = build_long(model), long_batch(model)
    exact = far_logits(built, batch)
    kept = {}
    for name in ("habana", "bert", "torch-cpu", WITHOUT_MUL):
        with converted(policy_of(name)):
            kept[name] = likeness(built, batch, exact)
    habana = kept.pop("habana")
    least = KEPT_BY_MIXTURES if model in FAMILIES["mixtures of experts"] else KEPT
    assert min(kept.values()) >= least, kept
    if model.name in HABANA_LOSES:
        assert 1 - habana > 4 * (1 - min(kept.values())), (habana, kept)
        assert abs(habana - HABANA_LOSES[model.name]) < 0.1, habana
    else:
        assert habana >= least, habana


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
