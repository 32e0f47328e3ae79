"""hmp.compare(): its numbers, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hmp
from hmp.numerics import distance as distances
from trap_kit import policy

# bfloat16 has eight significant bits: at 1 its spacing is 2**-7, and 1 + 2**-9 is rounded to 1; at 3 its spacing is 2**-6
X = 1 + 2.0**-9
W = 3.0
EXACT = W * X  # 3 + 3 * 2**-9, and bfloat16 has 3
LINEAR = 3 * 2.0**-9 / EXACT
LINEAR_ULPS = 3 * 2.0**-9 / 2.0**-6
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
    """`linear` rounds its input and nothing else: 3 x is 3, whose error is 0.375 of bfloat16's spacing. The second layer gets 3, which is
    exact: alone it errs by nothing, but what came in is off. The loss is 6 for 6 + 3 * 2**-8; the gradients of the two weights are 2 for
    2 x and 6 for 6 x."""
    comparison = found(bf16={"linear"})
    products = {(r.module, r.direction): r for r in comparison.rows if (r.op, r.aten) == ("linear", "mm")}
    assert len(products) == sum((r.op, r.aten) == ("linear", "mm") for r in comparison.rows)
    first, second, backward = products["first", "forward"], products["second", "forward"], products["first", "backward"]
    assert (first.isolated, first.isolated_ulps) == pytest.approx((LINEAR, 0.375))
    assert (first.dtype, first.listed, first.calls) == ("bfloat16", "bf16", 1)
    assert (second.isolated, second.accumulated, second.accumulated_ulps) == pytest.approx((0.0, LINEAR, LINEAR_ULPS))
    assert (backward.isolated, backward.isolated_ulps) == pytest.approx((WEIGHT_GRAD, 0.25))  # 2**-8 / 2**-6
    assert comparison.loss_value == 6.0
    assert comparison.loss == pytest.approx(LINEAR) == pytest.approx(comparison.output)
    off, exact = (2.0**-8, 3 * 2.0**-8), (2 * X, 6 * X)
    assert comparison.gradient == pytest.approx((sum(e**2 for e in off) / sum(e**2 for e in exact)) ** 0.5)


def test_float32_is_exact() -> None:
    """With `linear` on the FP32 list nothing rounds, and nothing is advised."""
    comparison = found(fp32={"linear"})
    assert {r.isolated for r in comparison.rows} == {0.0} == {r.accumulated for r in comparison.rows}
    assert comparison.advice == ()
    assert (comparison.output, comparison.loss, comparison.gradient) == (0.0, 0.0, 0.0)


def test_shares_are_of_the_squared_isolated_errors():
    """Of linear, forward and backward, and of exp, whose result is rounded: what each adds to the sum of squares."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(torch.nn.functional.linear(x, torch.full((1, 1), W)))

    with torch.no_grad():
        comparison = hmp.compare(Model(), torch.tensor([[X]]), policy(bf16={"linear", "exp"}))
    exp = float(torch.tensor(W).exp())  # 20.0855, at which bfloat16's spacing is 0.125: 20.125
    error = (20.125 - exp) / exp
    shares = dict(comparison.advice)
    assert shares == pytest.approx({"linear": LINEAR**2 / (LINEAR**2 + error**2), "exp": error**2 / (LINEAR**2 + error**2)}, rel=1e-5)
    assert [group.name for group in comparison.by_op()][:2] == ["exp", "linear"]


INF, NAN, MASK = float("inf"), float("nan"), torch.finfo(torch.float32).min


def test_distance() -> None:
    for got, reference, relative, ulps in (
        ([4.0, 3.0], [4.0, 3.0], 0.0, 0.0),
        ([4.0, 0.0], [4.0, 3.0], 3 / 5, 3 / (2.0**-10 + 2.0**-12) ** 0.5),
        ([1.0, -INF], [2.0, -INF], 0.5, 64.0),  # masked in both; at 2 the spacing is 2**-6
        ([1.0, NAN], [2.0, 1.0], INF, INF),
        ([1.0, torch.finfo(torch.bfloat16).min], [2.0, MASK], 0.5, 64.0),
    ):
        assert distances.distance(torch.tensor(got), torch.tensor(reference)) == pytest.approx((relative, ulps))
    for masked in (torch.finfo(torch.float16).min, torch.finfo(torch.float16).min + 64, -INF):  # float16's mask is float32's (R12)
        assert distances.distance(torch.tensor([1.0, masked]).half(), torch.tensor([2.0, MASK])).relative == 0.5
    assert distances.distance(torch.tensor([4e4]).half(), torch.tensor([4e4])).relative < 2.0**-11  # a number where float32 has one
    for alone in (NAN, -INF, 2.0**101):  # what one side alone has instead of a number is not hidden
        whole, broken = torch.tensor([1.0, 2.0]), torch.tensor([1.0, alone])
        for one, other in ((broken, whole), (whole, broken), (torch.tensor([1.0, -alone if alone == alone else INF]), broken)):
            assert distances.distance(one, other) == (INF, INF)
            assert distances.total([(torch.ones(2), torch.ones(2)), (one[1:], other[1:])]) == INF
        assert distances.distance(broken, broken) == (0.0, 0.0)
    reference = torch.tensor([1.0, 2.0**100])  # a number that rounding takes over the limit is none that one side alone has
    assert distances.distance(torch.tensor([1.0, 0.9 * 2.0**100]), reference) == (0.0, 0.0)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])  # squares of the last two are beyond float32
def test_distance_of_many_elements_is_that_of_float64(scale: float):
    torch.manual_seed(0)
    reference = torch.randn(2048) * scale
    got = reference.bfloat16()
    error, exact = got.double() - reference.double(), reference.double()
    spacing = 2.0 ** (exact.abs().log2().floor() - 7)
    wanted = (float(error.norm() / exact.norm()), float(error.norm() / spacing.norm()))
    assert distances.distance(got, reference) == pytest.approx(wanted, rel=1e-6)
