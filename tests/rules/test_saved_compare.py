"""compare() says what packing alone does to gradients: the distance of two runs of plain autograd, one with quantised tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp
import saved_oracle as oracle

pytestmark = oracle.packs

Tensor = torch.Tensor


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64, affine=False)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(self.norm(x))), 0.1))


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def gradients_of_quantised_tensors(model: Net, x: Tensor, recipe: str) -> dict[str, Tensor]:
    torch.manual_seed(7)
    names = dict(model.named_parameters())
    # what is computed of the batch alone is saved as it is
    hidden = F.linear(F.batch_norm(x, None, None, training=True), model.first.weight, model.first.bias)
    hidden = oracle.Dropout.apply(oracle.Gelu.apply(hidden, recipe), recipe)
    loss = squares(oracle.Linear.apply(hidden, model.second.weight, model.second.bias, recipe))
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def test_packing_alone_moves_gradients_as_quantised_tensors_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 64)
    packed = gradients_of_quantised_tensors(model, x, "fp8")
    torch.manual_seed(7)
    names = dict(model.named_parameters())
    exact = dict(zip(names, torch.autograd.grad(squares(model(x)), list(names.values())), strict=True))
    model.norm.reset_running_stats()

    def relative(*names: str) -> float:
        found, wanted = (torch.cat([each[name].double().flatten() for name in names]) for each in (packed, exact))
        return float((found - wanted).norm() / wanted.norm())

    torch.manual_seed(7)
    compared = hmp.compare(model, x, hmp.Policy("eight bits", saved={"gelu", "linear", "dropout"}, saved_recipe="fp8"), loss=squares)
    assert compared.gradient_packed == pytest.approx(relative(*names), rel=1e-6)
    # nothing else is rounded under this policy, and what is compared with float32 packs nothing
    assert compared.gradient == 0.0
    assert int(model.norm.num_batches_tracked) == 0 and all(p.grad is None for p in model.parameters())
    assert "error of the gradient by packing alone" in str(compared)
    values = json.loads(compared.to_json(tmp_path / "compared.json").read_text(encoding="utf-8"))
    assert values["gradient_packed"] == compared.gradient_packed


def test_a_model_with_an_applied_policy_is_told_of_too_and_one_without_a_saved_list_is_not() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 64)
    found = hmp.compare(model, x, "saved8", loss=squares).gradient_packed
    hmp.apply(model, "saved8")
    applied = hmp.compare(model, x, loss=squares).gradient_packed
    assert found == applied and found is not None and 0 < found < 0.05
    with torch.no_grad():
        assert hmp.compare(model, x).gradient_packed is None
    hmp.remove(model)
    assert hmp.compare(model, x, "torch-cpu", loss=squares).gradient_packed is None
