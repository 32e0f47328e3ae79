"""compare() under several policies: each beside float32, and the others beside the first."""

from __future__ import annotations

import json
import math
from dataclasses import replace
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
def test_both_stand_beside_float32_and_beside_each_other(found: Any) -> None:
    both, (low, half, exact) = found
    for end in ("output", "loss", "gradient"):
        sides = (both, low), (both.others[0], half)
        assert [getattr(side, end) for side, _ in sides] == [
            pytest.approx(norm(values[end] - exact[end]) / norm(exact[end]), rel=1e-3) for _, values in sides
        ]
        assert getattr(both.apart[0], end) == pytest.approx(norm(half[end] - low[end]) / norm(exact[end]), rel=1e-3)
    calls = {row.module: row for row in both.beside if (row.op, row.direction) == ("linear", "forward")}
    for row in (*calls.values(), *(row for row in both.beside_modules if row.module in calls)):
        a, b, wide = (values[row.module] for values in (low, half, exact))
        assert row.apart == (pytest.approx(norm(a - b) / norm(wide), rel=1e-3),)
        assert row.accumulated[1] < row.accumulated[0] / 4
    assert set(calls) == {"first", "second"}
    (row,) = (row for row in both.beside if (row.op, row.direction, row.module) == ("linear", "backward", "first"))
    a, b, wide = (values["first's gradient"] for values in (low, half, exact))  # x needs none
    assert row.apart == (pytest.approx(norm(a - b) / norm(wide), rel=1e-3),)
    assert calls["first"].isolated == tuple(
        pytest.approx(norm(values["first"] - exact["first"]) / norm(exact["first"]), rel=1e-3) for values in (low, half)
    )


def test_a_comparison_by_itself_has_the_same_figures(found: Any) -> None:
    both, _ = found
    torch.manual_seed(0)
    net, x = Net(), torch.randn(24, 16)
    alone = hmp.compare(net, x, HALF, loss=squares)
    assert not hasattr(alone, "comparisons")
    assert alone.rows == both.comparisons[1].rows and (alone.output, alone.gradient) == (both.others[0].output, both.others[0].gradient)


def test_the_verdict_says_who_is_nearer_and_which_op_makes_it(found: Any) -> None:
    both, (low, half, exact) = found
    times, gradient = ((norm(low[end] - exact[end]) / norm(half[end] - exact[end])) for end in ("output", "gradient"))
    parts = dict(both.difference())
    by_hand = {row.op: row.squares[0] - row.squares[1] for row in both.beside_ops}
    assert parts == {op: pytest.approx(more / sum(map(abs, by_hand.values()))) for op, more in by_hand.items() if more}
    op, part = max(parts.items(), key=lambda pair: pair[1])
    verdict = both.verdict()
    assert verdict.startswith("half is") and f"{times:.2g} times" in verdict and f"{gradient:.2g} times" in verdict
    assert f"{op} makes {100 * part:.0f} %" in verdict
    assert str(both).startswith(verdict)
    assert json.loads(json.dumps(both.to_dict()))["verdict"] == verdict


def test_the_verdict_says_of_whom_it_speaks_and_has_no_ratio_where_there_is_none(found: Any) -> None:
    both, _ = found
    for errors, gradients, subject, told in (
        ((0.0, 0.0), (None, None), "brain and half have", ""),
        ((0.0, 0.5), (0.1, 0.3), "brain has", "half is 0.5 away"),
        ((0.5, 0.51), (None, None), "brain and half are", "equally near"),
        ((0.5, 0.5), (0.3, 0.1), "brain and half are", "brain is 3 times farther in the gradient"),
        ((0.1, 9.96), (0.1, 0.1), "brain is", "100 times"),  # and not 1e+02
        ((math.inf, 0.5), (None, None), "brain makes", "NaN or Inf"),
        ((None, None), (None, None), "nothing", ""),
    ):
        other = replace(both.others[0], output=errors[1], gradient=gradients[1], loss=None)
        verdict = replace(both, output=errors[0], gradient=gradients[0], loss=None, others=(other,), beside_ops=()).verdict()
        assert verdict.startswith(subject) and told in verdict


def test_what_one_policy_makes_infinite_is_said_and_is_no_ratio(tmp_path: Path) -> None:
    """300 * 300 is beyond float16."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh())
    torch.nn.init.constant_(net[0].weight, 300.0)
    both = hmp.compare(net, torch.tensor([[300.0]]), [LOW, HALF], loss=lambda out: out.float().sum())
    (row,) = (row for row in both.beside if (row.op, row.direction) == ("linear", "forward"))
    assert row.isolated == (pytest.approx(0.0, abs=0.01), math.inf) and row.apart == (math.inf,)
    assert "nan" not in str(both).lower().replace("nan or inf", "")
    assert "NaN" not in both.to_json(tmp_path / "both.json").read_text(encoding="utf-8").replace("NaN or Inf", "")


def test_a_call_that_two_policies_make_of_other_aten_ops_is_one_call() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32, bias=False), torch.randn(48, 64)
    with torch.no_grad():
        both = hmp.compare(layer, x, [hmp.Policy("eight", fp8={"linear"}), LOW])

    def rounded(t: torch.Tensor) -> torch.Tensor:
        scale = 448 / t.abs().max()
        return (t * scale).to(torch.float8_e4m3fn).float() / scale

    eight = F.linear(rounded(x), rounded(layer.weight.detach())).bfloat16().double()
    low = F.linear(x.bfloat16(), layer.weight.detach().bfloat16()).double()
    exact = F.linear(x.double(), layer.weight.detach().double())
    # 1,536 elements, of which 1,024 are looked at
    assert both.beside_ops[0].apart == (pytest.approx(norm(eight - low) / norm(exact), rel=0.05),)
    assert both.apart[0].output == pytest.approx(norm(eight - low) / norm(exact), rel=0.01)


def test_what_only_one_policy_runs_stands_beside_nothing() -> None:
    class Forks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return torch.tanh(super().forward(x)) if x.dtype is torch.float16 else x

    both = hmp.compare(Forks(8, 8), torch.randn(4, 8), LOW, against=HALF)
    rows = {row.op: row for row in both.beside}
    assert rows["tanh"].isolated[0] is None and rows["tanh"].dtypes == ("", "float16") and rows["tanh"].apart == (None,)
    assert rows["linear"].apart == (None,)  # once and twice
    assert "brain and half" in both.notes[-1]  # whose float32 runs are two


def test_sparse_gradients_count() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    tokens = torch.tensor([[1, 2, 1]])

    def gradients(dtype: torch.dtype) -> torch.Tensor:
        weights = [p.detach().clone().requires_grad_() for p in net.parameters()]
        hidden = F.embedding(tokens, weights[0])
        out = F.linear(hidden.to(dtype), weights[1].to(dtype), weights[2].to(dtype))
        return torch.cat([g.flatten() for g in torch.autograd.grad(squares(out), weights)]).double()

    low, half, exact = map(gradients, (torch.bfloat16, torch.float16, torch.float32))
    both = hmp.compare(net, tokens, LOW, against=HALF, loss=squares)
    assert both.apart[0].gradient == pytest.approx(norm(low - half) / norm(exact), rel=1e-3)
    assert both.gradient == pytest.approx(norm(low - exact) / norm(exact), rel=1e-3)


def test_dropout_draws_the_same_under_each_policy() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))
    state = torch.get_rng_state()
    found = hmp.compare(net, torch.randn(16, 32), [LOW, HALF, policy(fp32={"linear"}, name="wide")], loss=squares)
    assert torch.equal(torch.get_rng_state(), state) is False  # randn above
    assert all(apart.gradient is not None and apart.gradient < 0.02 for apart in found.apart)  # around one with other masks
    assert found.notes == () and found.policies == ("brain", "half", "wide")


def test_an_fp8_list_stands_beside_the_low_dtype() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), torch.randn(16, 32)
    for lists in (hmp.Policy(fp8={"linear @ *"}), hmp.Policy(fp8={"linear"}, bf16={"linear"})):
        with torch.no_grad():
            found = hmp.compare(model, x, lists)
            exact = F.linear(x.double(), model[0].weight.double())
            low = F.linear(x.bfloat16(), model[0].weight.bfloat16()).double()
            assert found.policies == ("custom", "custom without FP8")
            assert found.output > 5 * found.others[0].output == pytest.approx(5 * norm(low - exact) / norm(exact), rel=0.02)
            hmp.apply(model, lists)
            assert not hasattr(hmp.compare(model, x), "comparisons")  # its calls follow the policy that is applied
            hmp.remove(model)


def test_wrong_use_is_an_error_that_names_the_policies() -> None:
    net, x = Net(), torch.randn(2, 16)
    with pytest.raises(hmp.HmpError, match="'brain' and 'other' are the same"):
        hmp.compare(net, x, LOW, against=LOW.replace(name="other"))
    for policies, against in (([LOW], None), ([], None), ([], LOW)):
        with pytest.raises(hmp.HmpError, match="give two or more, or one without a list"):
            hmp.compare(net, x, policies, against=against)
    with pytest.raises(hmp.OpListError, match="no_such"):
        hmp.compare(net, x, LOW, against="no_such")
    hmp.apply(net, LOW)
    with pytest.raises(hmp.HmpError, match=r"'brain' is applied to the model, .* not 'half'; call hmp.remove\(model\)"):
        hmp.compare(net, x, against=HALF)
