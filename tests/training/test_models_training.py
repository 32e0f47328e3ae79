"""Whole models train under the policies as they do in float32: outputs, gradients, parameters, statistics."""

from __future__ import annotations

import functools
import math

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import torch

import hmp
from model_zoo import MODELS
from model_zoo.checks import Reference, assert_gradients_follow, assert_state_moves, reference
from model_zoo.kit import Model, build, converted, train
from model_zoo.selection import POLICIES, each, is_late

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


# --- a model that is built after convert() is, to the bit, the one that is built before it, and stays float32


def held(built: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that the model holds: parameters, buffers, saved or not, and plain attributes of its modules."""
    found = dict((*built.named_parameters(), *built.named_buffers()))
    for path, module in built.named_modules():
        found |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return found


def differences(built: torch.nn.Module, exact: torch.nn.Module) -> list[str]:
    ours, theirs = held(built), held(exact)
    found = [f"{name} is there only once" for name in set(ours) ^ set(theirs)]
    for name in set(ours) & set(theirs):
        a, b = ours[name], theirs[name]
        if a.dtype is not b.dtype or type(a) is not type(b):
            found.append(f"{name}: {type(a).__name__} of {a.dtype}, not {type(b).__name__} of {b.dtype}")
        elif not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            found.append(f"{name}: other values")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", each(quick=("llama",)))
def test_r9_a_model_built_after_convert_is_the_one_built_before(model: Model):
    before = build(model)
    for policy in POLICIES:
        with converted(policy):
            assert differences(build(model), before) == [], policy
