"""The table of how far each model's first step is from float32's: what it counts, and that its command runs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import torch

from model_zoo import MODELS, deviations
from model_zoo.kit import backward, build, feed, gradients


@pytest.mark.slow
def test_a_deviation_is_of_the_loss_and_of_all_gradients(tmp_path: Path) -> None:
    """torch.autocast's own run of the model stands in for its lists': the same casts, and none of hmp's code."""
    assert deviations.main(["--models", "bert", "--write", str(tmp_path)]) == 0
    found = deviations.deviations(MODELS["bert"])

    def one(low: bool) -> tuple[float, torch.Tensor]:
        built = build(MODELS["bert"])
        with torch.autocast("cpu", enabled=low):
            loss, _ = backward(built, feed(MODELS["bert"], built))
        return loss, torch.cat([g.double().flatten() for g in gradients(built).values() if g is not None])

    (loss, own), (exact, other) = one(True), one(False)
    change, cosine = found["torch-cpu"]
    assert change == pytest.approx(abs(loss - exact) / exact, rel=0.2, abs=1e-6)
    assert 1 - cosine == pytest.approx(float(1 - torch.cosine_similarity(own, other, dim=0)), rel=0.2)
    assert found["fp8"][1] < cosine
