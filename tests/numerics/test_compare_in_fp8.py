"""compare() under an FP8 list: FP8 beside the low dtype beside float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def in_eight_bits(t: torch.Tensor) -> torch.Tensor:
    scale = 448 / t.abs().max()
    return (t * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [hmp.Policy(fp8={"linear"}), hmp.Policy(fp8={"linear @ *"}), hmp.Policy(fp8={"linear"}, bf16={"linear"})]
)
def test_a_products_error_in_fp8_stands_beside_its_error_in_bfloat16(policy: hmp.Policy, tmp_path: Path) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)), torch.randn(48, 64)
    weight = model[0].weight.detach()
    with torch.no_grad():
        found = hmp.compare(model, x, policy)
    exact = F.linear(x.double(), weight.double())
    low = F.linear(x.bfloat16(), weight.bfloat16())
    fp8 = F.linear(in_eight_bits(x), in_eight_bits(weight)).bfloat16()
    assert found.in_low is not None
    (group,), (beside,) = found.by_op(), found.in_low.by_op()
    assert (group.name, beside.name) == ("linear", "linear")
    assert group.isolated == pytest.approx(relative(fp8, exact), rel=0.02)
    assert beside.isolated == pytest.approx(relative(low, exact), rel=0.02)
    assert (found.in_low.policy, found.in_low.in_low) == (f"{policy.name} without FP8", None)
    table = str(found).splitlines()
    assert table[2].startswith("  with the low dtype in the place of FP8: output 0.00")
    assert [line.split()[:6] for line in table if line.startswith("  op ")] == [["op", "calls", "isolated", "without", "FP8", "ulps"]]
    saved = json.loads(found.to_json(tmp_path / "compared.json").read_text(encoding="utf-8"))
    assert saved["in_low"]["output"] == pytest.approx(relative(low, exact), rel=0.02)


def test_the_page_says_the_error_without_fp8(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="pages need the extra report")
    with torch.no_grad():
        found = hmp.compare(torch.nn.Linear(32, 32), torch.randn(16, 32), hmp.Policy(fp8={"linear"}))
    assert " with bfloat16 in the place of FP8</dd>" in found.to_html(tmp_path / "page.html").read_text(encoding="utf-8")


def test_without_fp8_and_with_an_applied_policy_one_run_is_compared() -> None:
    layer, x = torch.nn.Linear(32, 32), torch.randn(16, 32)
    with torch.no_grad():
        assert hmp.compare(layer, x, "torch-cpu").in_low is None
        hmp.apply(layer, hmp.Policy(fp8={"linear"}))
        assert hmp.compare(layer, x).in_low is None
