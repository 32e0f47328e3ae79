"""Whole models of transformers train under the policies as in float32: outputs, gradients, parameters, statistics.

They compute what torch.autocast computes, bit for bit. Decoders keep positions beyond 1,000, and habana's list is known where it
loses them.
"""

from __future__ import annotations

import functools
import math

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import torch

import hmp
from model_zoo import FAMILIES, MODELS
from model_zoo.checks import Reference, assert_gradients_follow, assert_state_moves, reference
from model_zoo.kit import Batch, Model, build, converted, cosine, feed, forward, gradients, loss_of, make_config, seed_all, train
from model_zoo.selection import POLICIES, each, is_late
from model_zoo.sizes import LOUD

# Of these less than half of the weights has a steady gradient, and the others' are not compared.
PARTLY_STEADY = {"gpt-oss": "its routers choose other experts when the weights change in their last bits"}


@functools.lru_cache(maxsize=2)
def wanted(name: str) -> Reference:
    """The float32 run; the policies of one model come one after the other."""
    return reference(MODELS[name])


@pytest.mark.parametrize(("model", "policy"), each(policies=POLICIES))
def test_a_model_trains_under_a_policy_as_in_float32(model: Model, policy: str):
    exact = wanted(model.name)
    run = train(model, policy, late=is_late(model))
    assert_gradients_follow(run, exact)
    assert_state_moves(run, exact)


# Without the lines for single modules: heads are in FP8 too.
FP8 = hmp.Policy.load("fp8").unscoped


@pytest.mark.parametrize("model", each(quick=("bert", "llama")))
def test_a_model_trains_in_fp8(model: Model):
    """Three bits of a mantissa turn the gradients of nets as small as these; that they are there and finite is what can be asked."""
    run = train(model, FP8, late=is_late(model))
    assert_gradients_follow(run, Reference(train(model), steady=frozenset()))
    assert all(math.isfinite(loss) for loss in run.losses), run.losses


@pytest.mark.parametrize("model", each(quick=()))
def test_most_of_a_models_gradient_is_compared(model: Model):
    coverage = reference(model).coverage
    assert (coverage < 0.5) == (model.name in PARTLY_STEADY), f"{coverage:.0%} of the weights have a steady gradient"
    assert coverage > 0.25


@pytest.mark.native_kernels
@pytest.mark.parametrize("model", each(quick=("llama",)))
def test_a_model_computes_what_torch_autocast_computes(model: Model) -> None:
    """With torch.autocast's lists and kernels loss and gradients are torch.autocast's bit for bit."""
    ours, built = train(model, "torch-cpu", steps=1), build(model)
    # autocast's cache sums the gradients of a weight's uses in bfloat16; hmp sums them in float32
    with torch.autocast("cpu", cache_enabled=False):
        loss = loss_of(forward(built, feed(model, built)))
    loss.backward()
    assert ours.losses == [loss.item()]
    for name, theirs in gradients(built).items():
        found = ours.gradients[name]
        assert found is theirs is None or torch.equal(found, theirs), name


# --- long sequences: what a decoder says at positions beyond 1,000, where bfloat16 cannot tell neighbours apart

LENGTH, FAR = 1152, 1001
ROOM = 2048

# ALiBi, sinusoids, tables and rotations of every kind. Not here: recurrences without positions, and encoders whose positions
# are a table that is looked up.
WITH_POSITIONS = (
    *(model.name for model in FAMILIES["decoders"]),
    *(model.name for model in FAMILIES["mixtures of experts"]),
    *("recurrent-gemma", "modernbert", "deberta-v2"),
)


def build_long(model: Model) -> torch.nn.Module:
    """The model with room for long sequences, and attention so sharp that its output hangs on every position."""
    config = make_config(model)
    changes = {"max_position_embeddings": ROOM}
    changes |= {name: ROOM for name in ("n_positions", "max_seq_len") if hasattr(config, name)}
    changes |= {name: ROOM for name in ("sliding_window",) if name in model.config}
    changes[[name for name in LOUD if getattr(config, name, None) is not None][-1]] = 0.4  # Funnel's initializer_std, not its range
    return build(model, **changes).eval()


def long_batch(model: Model) -> Batch:
    seed_all(model.seed + 1)
    return {"input_ids": torch.randint(5, 90, (1, LENGTH))}


def far_logits(built: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The logits at positions beyond 1,000, less what they have in common, which says nothing about positions."""
    with torch.no_grad():
        logits = built(**batch).logits[0, FAR:].double()
    return logits - logits.mean(0)


# The cosine of the logits beyond position 1,000 with float32's. Mixtures are lower: rounding sends some of 151 tokens to other
# experts; bfloat16 products alone, as torch.autocast makes them, cost some of them as much.
KEPT, KEPT_BY_MIXTURES = 0.97, 0.9
# `habana` holds `mul`, so `position * frequency` is rounded to eight bits and positions beyond 256 fall together (OPT without a
# mask multiplies the positions themselves): the cosines are 0.22 to 0.92. `habana` without `mul` keeps them.
HABANA_LOSES = "opt llama gemma2 falcon mixtral qwen2-moe gpt-oss llama4 recurrent-gemma modernbert".split()
WITHOUT_MUL = hmp.Policy.load("habana").replace(bf16=hmp.Policy.load("habana").bf16 - {"mul"}, name="habana without mul")


@pytest.mark.slow
@pytest.mark.parametrize("model", each(WITH_POSITIONS, quick=("gpt2", "llama")))
def test_logits_beyond_a_thousand_positions_are_float32s(model: Model):
    built, batch = build_long(model), long_batch(model)
    exact = far_logits(built, batch)
    kept = {}
    for name in ("habana", "bert", "torch-cpu", WITHOUT_MUL):
        with converted(name):
            kept[str(name)] = cosine(far_logits(built, batch), exact)  # float32's
    habana = kept.pop("habana")
    least = KEPT_BY_MIXTURES if model in FAMILIES["mixtures of experts"] else KEPT
    assert min(kept.values()) >= least, kept
    if model.name in HABANA_LOSES:
        assert 1 - habana > 4 * (1 - min(kept.values())), (habana, kept)
    else:
        assert habana >= least, habana
