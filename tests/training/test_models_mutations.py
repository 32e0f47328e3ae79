"""The checks of the models notice damage: each mutation of a model or a policy fails the check that is there for it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

from model_zoo import MODELS, mutations
from model_zoo.checks import assert_gradients_follow, assert_state_moves, reference
from model_zoo.kit import converted, train
from model_zoo.masking import alone, build_for_text, distance, padded
from model_zoo.positions import build_long, far_logits, likeness, long_batch, rounded_positions
from test_models_positions import KEPT, ROUNDED

POLICY = "torch-cpu"


def cases(*cases: tuple[str, ...]) -> list[object]:
    """One of each kind runs in the default command."""
    return [pytest.param(*case, marks=pytest.mark.slow if i else (), id="-".join(case)) for i, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("mutation", "name"),
    cases(("rotation_removed", "llama"), ("attention_removed", "vit"), ("mask_ignored", "bert")),
)
def test_mutation_turns_the_gradients(mutation: str, name: str):
    exact, mutate = reference(MODELS[name]), getattr(mutations, mutation)
    assert_gradients_follow(train(MODELS[name], POLICY, steps=1), exact)
    with pytest.raises(AssertionError, match="cosine with float32's"):
        assert_gradients_follow(train(MODELS[name], POLICY, mutate=mutate, steps=1), exact)


@pytest.mark.parametrize(
    ("name", "parameter"),
    cases(("resnet", "classifier.1.bias"), ("mixtral", "model.layers.1.mlp.gate.weight")),
)
def test_mutation_detached_parameter_has_no_gradient_and_does_not_move(name: str, parameter: str):
    exact = reference(MODELS[name])
    run = train(MODELS[name], POLICY, mutate=mutations.parameter_detached(parameter))
    with pytest.raises(AssertionError, match=f"{parameter}: gradient is None"):
        assert_gradients_follow(run, exact)
    with pytest.raises(AssertionError, match=f"{parameter}: did not move"):
        assert_state_moves(run, exact)


@pytest.mark.parametrize(("name", "side"), cases(("bert", "right"), ("llama", "left")))
def test_mutation_ignored_mask_makes_padding_count(name: str, side: str):
    built = build_for_text(MODELS[name])
    with converted(POLICY):
        assert distance(padded(built, side), alone(built)) < ROUNDED
        mutations.mask_ignored(built)
        assert distance(padded(built, side), alone(built)) > ROUNDED


@pytest.mark.parametrize("name", cases(("llama",), ("mixtral",)))
def test_mutation_rounded_positions_lose_the_far_logits(name: str):
    built, batch = build_long(MODELS[name]), long_batch(MODELS[name])
    exact = far_logits(built, batch)
    with converted(POLICY):
        assert likeness(built, rounded_positions(batch), exact) < KEPT < likeness(built, batch, exact)
