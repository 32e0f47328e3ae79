"""Architectures of transformers that nobody looked at: all of them train under the policies, and compute what torch.autocast computes."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import torch

import hmp
from low_kernels_kit import computes_in_float32
from model_zoo import shrunk
from model_zoo.checks import Reference, assert_gradients_follow
from model_zoo.kit import build, feed, forward, gradients, is_there, loss_of, train

# Without the entries for single modules heads are in FP8 too.
POLICIES = {"habana": "habana", "torch-cpu": "torch-cpu", "fp8": hmp.Policy.load("fp8").unscoped}
CLASSES = [cls for classes in shrunk.FAMILIES.values() for cls in classes]


def cases() -> list[object]:
    """One in the default command, one of twelve of the others in .ci/run, the rest in .ci/nightly."""
    tiers = [pytest.mark.nightly if at % 12 else pytest.mark.slow for at in range(len(CLASSES))]
    return [pytest.param(cls, marks=() if cls == "OlmoForCausalLM" else tier) for cls, tier in zip(CLASSES, tiers, strict=True)]


@pytest.mark.parametrize("cls", cases())
def test_an_architecture_trains_under_the_policies(cls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient is there and finite; with torch.autocast's lists and kernels loss and gradients are torch.autocast's bit for bit."""
    if not is_there(cls):
        pytest.skip(f"this transformers has no {cls}")
    model = shrunk.shrunk(cls)
    exact = train(model, steps=1)
    runs = {name: train(model, policy, steps=1) for name, policy in POLICIES.items()}
    for name, run in runs.items():
        assert_gradients_follow(run, Reference(exact, steady=frozenset()))
        assert math.isfinite(run.losses[0]), name
    native = runs["torch-cpu"]
    if computes_in_float32(torch.bfloat16):
        monkeypatch.setenv("HMP_LOW_KERNELS", "native")
        native = train(model, POLICIES["torch-cpu"], steps=1)
    built = build(model)
    # autocast's cache sums the gradients of a weight's uses in bfloat16; hmp sums them in float32
    with torch.autocast("cpu", cache_enabled=False):
        loss = loss_of(forward(built, feed(model, built)))
    loss.backward()
    assert native.losses == [loss.item()]
    for name, theirs in gradients(built).items():
        ours = native.gradients[name]
        assert ours is theirs is None or torch.equal(ours, theirs), name
