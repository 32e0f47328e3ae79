"""Products in FP8 in compare(), detect_nonfinite() and record(): errors, amax, scale, what saturates and is flushed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import hmp
from page_kit import said

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


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


def by_hand(tensor: torch.Tensor, form: torch.dtype) -> tuple[float, float, float, float]:
    """amax, scale, saturated and flushed shares of one tensor under one scale, element by element."""
    amax, most = tensor.detach().abs().max().double(), torch.finfo(form).max
    codes = (tensor.detach().double() * most / amax).clamp(-most, most).float().to(form).float()
    saturated = sum(abs(code) == most for code in codes.flatten().tolist()) / codes.numel()
    flushed = sum(c == 0 and v != 0 for c, v in zip(codes.flatten().tolist(), tensor.flatten().tolist(), strict=True)) / codes.numel()
    return float(amax), float(amax / most), saturated, flushed


def recorded(x: torch.Tensor, policy: hmp.Policy = LINEAR, steps: int = 1) -> tuple[Net, hmp.types.Report]:
    torch.manual_seed(0)
    net = Net()
    with hmp.casts(policy), hmp.record() as report:
        for _ in range(steps):
            net(x).float().square().sum().backward()
    return net, report


def wide(rows: int = 16) -> torch.Tensor:
    """Values over many powers of two, some of which one scale cannot keep."""
    torch.manual_seed(1)
    return torch.randn(rows, 32) * 2.0 ** torch.randint(-24, 8, (rows, 32))


def test_tensors_have_the_figures_of_plain_torch() -> None:
    torch.manual_seed(0)
    net, x = Net(), wide()
    seen: list[torch.Tensor] = []
    with hmp.casts(LINEAR), hmp.record() as report:
        y = net(x)
        y.register_hook(seen.append)
        y.float().square().sum().backward()
    rows = {(row.module, row.role): row for row in report.fp8}
    assert set(rows) == {(module, role) for module in ("one", "two") for role in ("input", "weight", "grad")}
    hand = {("one", "input"): (x, E4M3), ("one", "weight"): (net.one.weight, E4M3), ("two", "weight"): (net.two.weight, E4M3),
            ("two", "grad"): (seen[0], E5M2)}  # fmt: skip
    for key, (tensor, form) in hand.items():
        row, (amax, scale, saturated, flushed) = rows[key], by_hand(tensor, form)
        assert row.op == "linear" and row.amax == pytest.approx(amax)
        assert row.least_scale == row.greatest_scale == pytest.approx(scale, rel=1e-6)
        assert row.saturated == pytest.approx(saturated, abs=1e-6) and row.flushed == pytest.approx(flushed, abs=1e-6)
    assert rows["one", "input"].flushed > 0.3  # else flushing was not tried


def test_scales_of_rows_have_a_range_and_flush_less() -> None:
    x = torch.randn(16, 32) * 2.0 ** torch.arange(-16, 16, 2).unsqueeze(1)
    one, many = (recorded(x, LINEAR.replace(fp8_recipe=recipe))[1].fp8[0] for recipe in ("tensorwise", "rowwise_with_gw_hp"))
    assert many.least_scale < 1e-3 * many.greatest_scale and one.least_scale == one.greatest_scale
    assert (one.tensors, many.tensors) == (1, 1)
    assert many.flushed < 0.01 < 0.1 < one.flushed


def test_the_copy_along_the_other_axis_for_the_weights_gradient_is_told_too() -> None:
    x = torch.randn(16, 32) * 2.0 ** torch.arange(-16, 16, 2).unsqueeze(1)
    scales = 2.0 ** torch.floor(torch.log2(448 / x.abs().amax(0, keepdim=True)))
    of_columns = float((((x * scales).to(torch.float8_e4m3fn).float() == 0) & (x != 0)).float().mean())
    assert of_columns > 0.1
    row = recorded(x, LINEAR.replace(fp8_recipe="rowwise"))[1].fp8[0]
    assert (row.role, row.tensors) == ("input", 2)
    assert row.flushed == pytest.approx(of_columns / 2, abs=0.01)  # scales of rows flush nothing
    blocks = recorded(x, LINEAR.replace(fp8_recipe="mxfp8"))[1].fp8[0]
    assert 0 < blocks.least_scale < blocks.greatest_scale
    assert torch.tensor([blocks.least_scale, blocks.greatest_scale]).log2().frac().eq(0).all()  # powers of two


def test_steps_add_up_and_so_do_ranks() -> None:
    x = wide()
    _, once = recorded(x)
    _, thrice = recorded(x, steps=3)
    assert [(row.tensors, row.amax) for row in thrice.fp8 if row.role != "grad"] == [
        (3, row.amax) for row in once.fp8 if row.role != "grad"
    ]
    merged = once.merge(thrice)
    assert [row.tensors for row in merged.fp8] == [4] * 6
    assert merged.fp8[0].flushed == pytest.approx(once.fp8[0].flushed)


def test_it_is_in_the_text_the_json_and_the_page_and_of_no_fp8_nothing_is(tmp_path: Path) -> None:
    _, report = recorded(wide())
    _, without = recorded(torch.randn(16, 32), hmp.Policy(bf16={"linear"}))
    assert "FP8" in str(report) and without.fp8 == [] and "FP8" not in str(without)
    assert hmp.types.Report.load(report.to_json(tmp_path / "r.json")).fp8 == report.fp8
    assert f"{100 * report.fp8[0].flushed:.2f} %" in said(report.to_html(tmp_path / "r.html").read_text())
    values = report.to_dict()
    del values["fp8"]  # as reports of before FP8 are
    assert hmp.types.Report.from_dict(values).fp8 == []
