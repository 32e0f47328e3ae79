"""hmp.compare(): its numbers, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hmp
from trap_kit import policy

# bfloat16 has eight significant bits: at 1 its spacing is 2**-7, and 1 + 2**-9 is rounded to 1; at 3 its spacing is 2**-6
X = 1 + 2.0**-9
W = 3.0
EXACT = W * X  # 3 + 3 * 2**-9, and bfloat16 has 3
LINEAR = 3 * 2.0**-9 / EXACT
WEIGHT_GRAD = 2.0**-8 / (2 + 2.0**-8)  # 2 * X for a gradient of 2, and bfloat16 has 2


class TwoLayers(torch.nn.Module):
    """x → 3 x → 1 (3 x), doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 1, bias=False)
        self.second = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(W)
            self.second.weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * 2


def found(**lists: Any) -> Any:
    return hmp.compare(TwoLayers(), torch.tensor([[X]]), policy(**lists), loss=lambda out: out.sum())


def test_isolated_is_an_ops_own_rounding_and_accumulated_what_came_in_too() -> None:
    """`linear` rounds its input and nothing else: 3 x is 3. The second layer gets 3, which is exact: alone it errs by nothing, but what
    came in is off. The loss is 6 for 6 + 3 * 2**-8; the gradients of the two weights are 2 for 2 x and 6 for 6 x."""
    comparison = found(bf16={"linear"})
    products = {(r.module, r.direction): r for r in comparison.rows if (r.op, r.aten) == ("linear", "mm")}
    assert len(products) == sum((r.op, r.aten) == ("linear", "mm") for r in comparison.rows)
    first, second, backward = products["first", "forward"], products["second", "forward"], products["first", "backward"]
    assert first.isolated == pytest.approx(LINEAR)
    assert (first.dtype, first.listed, first.calls) == ("bfloat16", "bf16", 1)
    assert (second.isolated, second.accumulated) == pytest.approx((0.0, LINEAR))
    assert backward.isolated == pytest.approx(WEIGHT_GRAD)
    assert comparison.loss_value == 6.0
    assert comparison.loss == pytest.approx(LINEAR) == pytest.approx(comparison.output)
    off, exact = (2.0**-8, 3 * 2.0**-8), (2 * X, 6 * X)
    assert comparison.gradient == pytest.approx((sum(e**2 for e in off) / sum(e**2 for e in exact)) ** 0.5)


def test_float32_is_exact() -> None:
    """With `linear` on the FP32 list nothing rounds, and nothing is advised."""
    comparison = found(fp32={"linear"})
    assert {r.isolated for r in comparison.rows} == {0.0} == {r.accumulated for r in comparison.rows}
    assert comparison.advice == () == comparison.trials.alone
    assert "nothing has to be moved: the error is within the tolerance of 0.0039" in str(comparison)
    assert (comparison.output, comparison.loss, comparison.gradient) == (0.0, 0.0, 0.0)


def test_shares_are_of_the_squared_isolated_errors():
    """Of linear, forward and backward, and of exp, whose result is rounded: what each adds to the sum of squares."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(torch.nn.functional.linear(x, torch.full((1, 1), W)))

    with torch.no_grad():
        comparison = hmp.compare(Model(), torch.tensor([[X]]), policy(bf16={"linear", "exp"}), tolerance=0.001)
    exp = float(torch.tensor(W).exp())  # 20.0855, at which bfloat16's spacing is 0.125: 20.125
    error = (20.125 - exp) / exp
    shares = {group.name: group.share for group in comparison.by_op() if group.share}
    assert shares == pytest.approx({"linear": LINEAR**2 / (LINEAR**2 + error**2), "exp": error**2 / (LINEAR**2 + error**2)}, rel=1e-5)
    assert [group.name for group in comparison.by_op()][:2] == ["exp", "linear"]
    # 3 + 3 * 2**-9 is rounded by linear, and by exp's cast of it, too: to move one of them gains nothing
    assert [trial.gains(comparison.trials.start) for trial in comparison.trials.alone] == [False, False] and comparison.advice == ()
    assert {move.entry for move in comparison.trials.together.moves} == {"linear", "exp"} and comparison.trials.together.output == 0.0
    assert "several ops share the cause" in str(comparison)


def test_a_listed_sum_is_measured_as_it_runs_with_both_inputs_rounded() -> None:
    """A sum with what may be a mask, and is none: torch adds the rounded inputs, and rounds. Its error is the output's, by torch alone."""
    x, shift = torch.linspace(-1, 3, 32).reshape(4, 8), torch.linspace(-2, 2, 8)

    class Shifted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + shift

    comparison = hmp.compare(Shifted(), x, policy(bf16={"add"}))
    (row,) = (each for each in comparison.rows if each.aten == "add")
    exact = x.double() + shift.double()
    off = x.bfloat16() + shift.bfloat16() - exact
    assert (row.isolated, comparison.output) == pytest.approx((float(off.norm() / exact.norm()),) * 2, rel=1e-4)
