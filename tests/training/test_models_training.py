"""Whole models train under the policies as they do in float32: outputs, gradients, parameters, statistics."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import hmp
from model_zoo import FAMILIES, MODELS
from model_zoo.checks import Reference, assert_gradients_follow, assert_state_moves, reference
from model_zoo.kit import Model, train
from model_zoo.selection import POLICIES, each, is_late

# Models whose gradients are mostly too unsteady in float32 to be compared; everything else is checked of them.
UNSTEADY = {
    "slanet": "thirty batch norms over the few values that a tiny image leaves: rounding the weights turns every gradient before them",
}
# Of these less than half of the weights has a steady gradient, and the others' are not compared.
PARTLY_STEADY = {"gpt-oss": "its routers choose other experts when the weights change in their last bits"}
# Weights whose gradient turns with the kernel that computes in bfloat16, under torch.autocast to the same bits.
TURNED_BY_KERNELS = {"dpt": ("neck.reassemble_stage",)}  # on a processor with AMX

# Buffers that the model's own code casts to the dtype of its input, under torch.autocast as well.
ROUNDS_ITSELF = {"wav2vec2-conformer": "wav2vec2_conformer.encoder.embed_positions.pe"}


@functools.lru_cache(maxsize=2)
def wanted(name: str) -> Reference:
    """The float32 run; the policies of one model come one after the other."""
    found = reference(MODELS[name])
    turned = ("",) if name in UNSTEADY else TURNED_BY_KERNELS.get(name, ())
    return dataclasses.replace(found, steady=frozenset(weight for weight in found.steady if not weight.startswith(turned)))


@pytest.mark.parametrize(("model", "policy"), each(policies=POLICIES))
def test_a_model_trains_under_a_policy_as_in_float32(model: Model, policy: str):
    exact = wanted(model.name)
    run = train(model, policy, late=is_late(model))
    assert_gradients_follow(run, exact)
    assert_state_moves(run, exact, ROUNDS_ITSELF.get(model.name))


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
    assert (coverage < 0.5) == (model.name in UNSTEADY | PARTLY_STEADY), f"{coverage:.0%} of the weights have a steady gradient"
    assert coverage > 0.25 or model.name in UNSTEADY


def test_the_zoo_holds_every_kind_of_model():
    assert len(MODELS) == sum(map(len, FAMILIES.values())) >= 70
    assert all(len(family) >= 5 for family in FAMILIES.values())
    assert {model.attention for model in MODELS.values()} >= {None, "eager"}
