"""compare(), detect_nonfinite() and benchmark() with products in FP8."""

from __future__ import annotations

import math

import pytest
import torch

import hmp

LINEAR = hmp.Policy(fp8={"linear"})


def network() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)), torch.randn(16, 32)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_the_output_and_the_gradients_are_as_far_from_float32_as_they_are(recipe: str) -> None:
    model, x = network()
    policy = LINEAR.replace(fp8_recipe=recipe)
    found = hmp.compare(model, x, policy, loss=lambda out: out.float().square().mean())

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = model(x)
        out.float().square().mean().backward()
        return out.detach().double(), torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    wanted = run()
    with hmp.casts(policy):
        got = run()
    for told, one, other in zip((found.output, found.gradient), got, wanted, strict=True):
        assert told == pytest.approx(((one - other).norm() / other.norm()).item(), rel=1e-3)
    linear = next(group for group in found.by_op() if group.name == "linear")
    assert 0.01 < linear.isolated < 0.2 and linear.share > 0.9
    low = hmp.compare(model, x, hmp.Policy(bf16={"linear"}), loss=lambda out: out.float().square().mean())
    assert found.output > 5 * low.output  # three digits of a mantissa, not seven


def test_a_healthy_model_has_no_finding_and_a_nan_is_found_where_it_came_in() -> None:
    model, x = network()
    for batch in (x, torch.zeros_like(x), torch.full_like(x, 1e-42)):  # whose scales are those of nothing
        with hmp.casts(LINEAR), hmp.detect_nonfinite("log") as found:
            model(batch).float().sum().backward()
        assert not found
    x[0, 0] = float("nan")
    with hmp.casts(LINEAR), hmp.detect_nonfinite("log") as found:
        model(x)
    assert {finding.kind for finding in found} == {"data"}


def test_an_infinity_that_was_given_and_is_nan_in_fp8_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """FP8 has no Inf: the product makes NaN of it, and nobody wrote the NaN."""
    x = torch.ones(16, 32)
    x[0, 0] = math.inf
    with hmp.casts(LINEAR), hmp.detect_nonfinite("log") as found:
        assert torch.nn.functional.linear(x, torch.ones(16, 32)).isnan().any()
    assert not found
    [record] = caplog.records
    assert "`linear` made NaN out of infinities" in record.getMessage()


def test_the_advice_on_a_product_in_fp8_can_be_followed() -> None:
    """An op may not be on the FP8 and the FP32 list: what is on the former is to be taken off it."""
    model, x = network()
    policy = LINEAR.replace(bf16={"gelu"})
    found = hmp.compare(model, x, policy)
    assert {row.listed for row in found.rows if row.op == "linear"} == {"fp8"}
    first, together = found.first_changes()[:2]
    assert "off the FP8 list first: linear @ " in first and first in str(found) and "linear @ 2 + linear @ 0" in together
    moved = policy
    for move in found.trials.together.moves:
        assert move.to == "bf16"
        moved = moved.move(*move)
    assert hmp.compare(model, x, moved).output == pytest.approx(found.trials.together.output, rel=1e-3)
    assert found.trials.together.output < found.output / 5
