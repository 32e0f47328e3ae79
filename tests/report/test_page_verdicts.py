"""What a page says first: a sentence of what came of it, the model, the date and the versions; and which advice is none."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

import hmp
import page_kit
import tune_result_kit
from hmp.numerics.page import comparison_page
from hmp.report.page import advice, report_page
from hmp.tune.page import tuning_page
from hmp.tune.result import result_of
from page_kit import said


def verdict(html: str) -> str:
    found = re.search(r'<p id="verdict">(.*?)</p>\n<p class="made soft">', html, re.DOTALL)
    assert found is not None
    return said(f"<p>{found[1]}</p>")


def test_a_report_says_first_what_was_seen() -> None:
    # in bfloat16: linear 4, mul 2, layer_norm 2, max_pool2d 3, view 2; 130 ms of 681 ms are casts
    assert verdict(report_page(page_kit.report())) == (
        "13 of 24 calls computed in bfloat16; casts took 19 % of the time in ops and casts; 6 changes to the lists are worth a try."
    )
    assert verdict(report_page(hmp.Report())) == "No policy decided any of 0 calls: all ran as torch has them."
    (alone,) = (row for row in page_kit.ROWS if row.op == "max_pool2d")
    assert verdict(report_page(page_kit.report((alone,)))) == "No policy decided any of 3 calls: all ran as torch has them."


@pytest.mark.slow
def test_a_comparison_says_first_how_far_it_is_from_float32() -> None:
    assert verdict(comparison_page(page_kit.comparison(gradient=0.0061))) == (
        "Under mine the output is 4 %, the loss is 0.001 % and the gradient is 0.61 % away from float32's; "
        "mul makes 70 % of the rounding error."
    )
    assert verdict(comparison_page(page_kit.comparison())).startswith(
        "Under mine the gradient cannot be compared with float32's: NaN, Inf, or"
    )
    only = page_kit.comparison(output=0.0, loss=None, gradient=None, rows=(), advice=())
    assert verdict(comparison_page(only)) == "Under mine the output is 0 % away from float32's; no op in bfloat16 stands out."
    assert verdict(comparison_page(replace(only, output=None))) == "Nothing of the whole was compared."


@pytest.mark.slow
def test_a_search_says_first_what_it_gained_and_what_it_cost() -> None:
    result = tune_result_kit.result()
    assert verdict(tuning_page(result)) == (
        "A step takes 0.62 of float32's time, with 2 of 9 units in bfloat16; loss 0.10% worse and metric 0.11% worse, within the tolerance."
    )
    small = verdict(tuning_page(tune_result_kit.result(objective="memory")))
    assert small.startswith("A step keeps 0.71 of float32's bytes for backward, with 2 of 9 units in bfloat16;")
    assert verdict(tuning_page(tune_result_kit.result(best=result.trials[0]))) == (
        "Stay in float32: of 6 trials none within the tolerance was faster."
    )


def test_worse_is_worse_for_a_loss_and_for_a_metric() -> None:
    result = tune_result_kit.result()
    better = replace(result.best, loss=1.98, loss_change=-0.01, metric=0.92, metric_change=-0.011)
    trials = tuple(better if trial is result.best else trial for trial in result.trials)
    text = said(tuning_page(replace(result, best=better, trials=trials)))
    assert "loss 1.00% better 1.98, float32 2" in text
    assert "metric 1.10% better 0.92, float32 0.91" in text


@pytest.mark.slow
def test_pages_say_of_which_model_when_and_with_what_versions(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    x = torch.ones(2, 4)
    today = f"{datetime.now():%Y-%m-%d}"
    with hmp.casts("habana"), hmp.record() as report:
        torch.nn.MSELoss()(net(x), torch.zeros(2, 8))  # a loss has no parameters: it is no model
    comparison = hmp.compare(net, x, "habana", loss=lambda output: output.float().sum())
    tuned = hmp.tune(net, [x], loss=lambda model, batch: model(batch).float().square().mean(), budget="3 evaluations")
    kept = hmp.Report.load(report.to_json(tmp_path / "report.json"))
    for page in (report_page(kept), comparison_page(comparison), tuning_page(result_of(tuned.to_dict()))):
        found = re.search(r'<p class="made soft">(.*?)</p>', page)
        assert found is not None
        model_, date, version, of_torch, device, *_ = re.findall(r"<span>(.*?)</span>", found[1])
        assert (model_, version, of_torch, device) == ("model Sequential", f"hmp {hmp.__version__}", f"torch {torch.__version__}", "cpu")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", date) and date[:10] >= today


def test_advice_that_is_about_no_time_names_no_share_of_it() -> None:
    lacking = page_kit.row("cdist", "bf16", ("bfloat16", "float32", "bfloat16"), "net.head", 16, no_kernel=2, op_seconds=0.5)
    found = advice.advices(page_kit.report((lacking,), never_called=[]))
    assert [(item.title, item.stake) for item in found.items] == [("Take cdist off the BF16 list", "")]
    text = said(report_page(page_kit.report((lacking,), never_called=[])))
    change = text[text.index("What to change in your lists") : text.index("The rules by which")]
    assert "Take cdist off" in change and "At stake" not in change and "0 %" not in change


def test_an_op_that_computes_in_float32_is_not_advised_for_the_fp32_list() -> None:
    row = replace(page_kit.comparison().rows[0], op="add", dtype="float32", listed="promote", isolated=1e-7, share=1.0)
    values = page_kit.comparison(advice=(("add", 1.0),), rows=(row,))
    assert "No op in low precision stands out." in said(comparison_page(values))
    low = replace(values, rows=(replace(row, dtype="bfloat16"),))
    assert "Try add on the FP32 list" in said(comparison_page(low))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    only = hmp.Policy("only", bf16={"softmax"})  # nothing of the model is on it: all of it computes in float32
    assert hmp.compare(net, torch.rand(3, 4), only, loss=torch.sum).advice == ()
