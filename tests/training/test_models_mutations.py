"""The checks of the models notice damage: each mutation of a model or a policy fails the check that is there for it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

from model_zoo import MODELS, mutations
from model_zoo.checks import assert_gradients_follow, assert_state_moves, reference
from model_zoo.kit import train

POLICY = "torch-cpu"


def test_mutation_turns_the_gradients():
    exact = reference(MODELS["llama"])
    assert_gradients_follow(train(MODELS["llama"], POLICY, steps=1), exact)
    with pytest.raises(AssertionError, match="cosine with float32's"):
        assert_gradients_follow(train(MODELS["llama"], POLICY, mutate=mutations.rotation_removed, steps=1), exact)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("resnet", "classifier.1.bias"), pytest.param("mixtral", "model.layers.1.mlp.gate.weight", marks=pytest.mark.slow)],
)
def test_mutation_detached_parameter_has_no_gradient_and_does_not_move(name: str, parameter: str):
    exact = reference(MODELS[name])
    run = train(MODELS[name], POLICY, mutate=mutations.parameter_detached(parameter))
    with pytest.raises(AssertionError, match=f"{parameter}: gradient is None"):
        assert_gradients_follow(run, exact)
    with pytest.raises(AssertionError, match=f"{parameter}: did not move"):
        assert_state_moves(run, exact)
