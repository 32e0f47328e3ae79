"""compare(against=...): two policies, each against float32, as columns of one comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

LOW = policy(bf16={"linear"}, name="brain")
HALF = policy(bf16={"linear"}, dtype=torch.float16, name="half")


# a product of backward that computes in float32 is compared before it is rounded
pytestmark = pytest.mark.native_kernels


def norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def run(net: Net, x: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What each layer returns, the loss and the gradients, with the products in `dtype`: plain torch."""
    weights = [layer.weight.detach().clone().requires_grad_() for layer in (net.first, net.second)]
    hidden = F.linear(x.to(dtype), weights[0].to(dtype))
    output = F.linear(torch.tanh(hidden).to(dtype), weights[1].to(dtype))
    loss = squares(output)
    gradients = torch.autograd.grad(loss, weights)
    whole = torch.cat([g.flatten() for g in gradients])
    found = {"first": hidden, "second": output, "output": output, "loss": loss, "gradient": whole, "first's gradient": gradients[0]}
    return {name: tensor.detach().double() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def found() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(24, 16)
    return hmp.compare(net, x, LOW, against=HALF, loss=squares), [
        run(net, x, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]


@pytest.mark.slow
def test_both_are_against_float32(found: Any) -> None:
    both, (low, half, exact) = found
    for end in ("output", "loss", "gradient"):
        assert [getattr(side, end) for side in (both, both.against)] == [
            pytest.approx(norm(values[end] - exact[end]) / norm(exact[end]), rel=1e-3) for values in (low, half)
        ]
    for side, values in ((both, low), (both.against, half)):
        calls = {row.module: row for row in side.rows if (row.op, row.direction, row.aten) == ("linear", "forward", "mm")}
        assert set(calls) == {"first", "second"}
        for module, row in calls.items():
            accumulated = norm(values[module] - exact[module]) / norm(exact[module])
            assert row.accumulated == pytest.approx(accumulated, rel=1e-3)
        assert calls["first"].isolated == pytest.approx(norm(values["first"] - exact["first"]) / norm(exact["first"]), rel=1e-3)


def test_what_one_policy_makes_infinite_is_said(tmp_path: Path) -> None:
    """300 * 300 is beyond float16."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh())
    torch.nn.init.constant_(net[0].weight, 300.0)
    both = hmp.compare(net, torch.tensor([[300.0]]), LOW, against=HALF, loss=lambda out: out.float().sum())
    errors = [group.isolated for side in (both, both.against) for group in side.by_op() if group.name == "linear"]
    assert errors == [pytest.approx(0.0, abs=0.01), math.inf]
    lines = [line.split() for line in str(both).splitlines() if line.startswith("linear  ")]
    assert lines[1][2:4] == [">1", ">1"] and lines[0][2] != ">1" and "nan" not in str(both).lower()
    assert "NaN" not in both.to_json(tmp_path / "both.json").read_text(encoding="utf-8")


def test_dropout_draws_the_same_under_each_policy() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))
    x, state = torch.randn(16, 32), torch.get_rng_state()
    found = hmp.compare(net, x, LOW, against=HALF, loss=squares)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.against is not None and found.loss_value == pytest.approx(found.against.loss_value, rel=0.01)
    torch.manual_seed(1)
    assert hmp.compare(net, x, LOW, loss=squares).loss_value != pytest.approx(found.loss_value, rel=0.01)  # under other masks


def test_wrong_use_is_an_error_that_names_the_policies() -> None:
    net, x = Net(), torch.randn(2, 16)
    with pytest.raises(hmp.HmpError, match="against='other' is the same policy as 'brain'"):
        hmp.compare(net, x, LOW, against=LOW.replace(name="other"))
    with pytest.raises(hmp.errors.OpListError, match="no_such"):
        hmp.compare(net, x, LOW, against="no_such")
    hmp.apply(net, LOW)
    with pytest.raises(hmp.HmpError, match=r"'brain' is applied to the model .* 'half'; call hmp.remove\(model\)"):
        hmp.compare(net, x, against=HALF)
