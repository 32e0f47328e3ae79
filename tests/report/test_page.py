"""The page of a report: what it says and says first, that it is one small file that needs nothing else, and no HTML of names."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
import page_kit
import tune_result_kit
from hmp.numerics.page import comparison_page
from hmp.report.models import Model
from hmp.report.page import advice, model, report_page
from hmp.report.rows import Row
from hmp.tune.page import tuning_page
from page_kit import Page, said

BARE = {"rows": (), "loss": None, "advice": ()}
NOTHING = replace(tune_result_kit.bare(), best=tune_result_kit.FLOAT32)
PAGES = {
    "report": lambda: report_page(page_kit.report()),
    "empty": lambda: report_page(hmp.Report()),
    "comparison": lambda: comparison_page(page_kit.comparison(gradient=0.0061)),
    "exact comparison": lambda: comparison_page(page_kit.comparison(**BARE, output=0.0, gradient=None)),
    "infinite comparison": lambda: comparison_page(page_kit.comparison(**BARE, output=None, gradient=math.inf)),
    "tuning": lambda: tuning_page(tune_result_kit.result()),
    "tuning for nothing": lambda: tuning_page(NOTHING),
}


@functools.cache
def page_of(name: str) -> str:
    """To draw its charts takes half a second."""
    return PAGES[name]()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_one_well_formed_file_that_asks_for_no_other(name: str) -> None:
    html = page_of(name)
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert all(url.startswith("#") or url == "data:," for url in page.urls)
    assert {url[1:] for url in page.urls if url[0] == "#"} <= set(page.ids)
    assert all(head.get("scope") in ("col", "row") for head in page.heads)
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"https?:|//www|url\((?!#)|@import", without_names)
    assert "default-src 'none'" in html


def test_names_are_text_and_never_html() -> None:
    nasty = page_kit.NASTY
    rows = [Row(f"op{nasty}", "bf16", f"x{nasty} (/a/{nasty}:1)", "float32", f"float32{nasty}", "$x$", f"net.{nasty}", f"/{nasty}", 1, 1, 1,
                0, 1, 1.0, 1.0), Row("--><b>&amp;", "unlisted", "", "", "", "", "]]><i>", "", 0, 1, 0, 0, 0, 1.0)]  # fmt: skip
    policy = {"name": nasty, "bf16": [nasty], "fp32": [], "promote": [], "dtype": "bfloat16", "fingerprint": nasty}
    report = page_kit.report(tuple(rows), policies=[policy], never_called=[nasty], device=nasty)
    rule = hmp.Rule(nasty, "bf16", nasty, nasty, nasty, 1, (f"{nasty}: {nasty}",), (nasty,), nasty)
    for html in (
        report_page(report),
        page_of("comparison"),
        tuning_page(tune_result_kit.nasty(nasty)),
        report._repr_html_(),
        rule._repr_html_(),
        hmp.Policy(nasty)._repr_html_(),
    ):
        assert nasty not in html
        assert "<b>&amp;" not in html.replace("<b>&amp;lt;", "") and "<i>]]" not in html and "]]><i>" not in html
        assert "alert(1)" in Page(html).text


@pytest.mark.slow
def test_a_large_recording_stays_below_two_megabytes_and_says_what_is_left_out() -> None:
    html = report_page(page_kit.large())
    assert len(html.encode()) < 2_000_000
    assert "1,000 of 2,800" in said(html)
    many = tuple(replace(each, module=f"net.{at}") for at in range(250) for each in page_kit.comparison().rows)
    assert len(comparison_page(page_kit.comparison(rows=many)).encode()) < 2_000_000


def test_a_report_says_what_was_in_force_and_where_the_time_went() -> None:
    report = page_kit.report()
    text = said(page_of("report"))
    assert f"mine {page_kit.POLICY.fingerprint}" in text
    for number in ("130 ms", "19 %", "551 ms", "24 calls, 17 by a rule", "54 %"):
        assert number in text, number
    assert "cdist: 2 of 2 calls" in text and "max_pool1d" in text  # for want of a kernel, and never called
    modules = {row.inputs: model.modules_of(report, row) for row in model.cast_places(report) if row.op == "linear"}
    assert modules == {"float32": "net.layer.0.query", "bfloat16, float32": "net.layer.1.query"}  # those that had its dtypes alone


def test_an_op_that_torch_promotes_computes_in_the_dtype_of_its_result() -> None:
    low, wide = torch.rand(2, 2).bfloat16() + 1, torch.rand(2, 2) + 1
    with hmp.casts(page_kit.POLICY), hmp.record() as report:
        torch.add(low, wide)
        torch.igamma(low, wide)  # hmp stands in for it, for want of a kernel (R11)
    assert {row.op: row.compute for row in report.rows} == {"add": "float32", "igamma": "float32"}


def test_what_to_change_is_said_in_lines_to_copy() -> None:
    found = advice.advices(page_kit.report())
    assert {f"{change.sign}{change.cast} {change.name}" for item in found.items for change in item.changes} == {
        "+bf16 relu", "+bf16 add", "+bf16 layer_norm", "-fp32 tanh", "-bf16 mul", "-bf16 cdist",
    }  # fmt: skip
    assert [item.seconds for item in found.items] == sorted((item.seconds for item in found.items), reverse=True)
    policy = page_kit.POLICY
    values: dict[str, Any] = {"hmp": hmp, "given": policy}
    exec(found.code.replace("policy = ...", "policy = given").replace("tried.save", "(lambda folder: None)"), values)
    tried = values["tried"]
    assert tried.bf16 == (policy.bf16 - {"mul", "cdist"}) | {"relu", "add", "layer_norm"}
    assert tried.fp32 == {"cross_entropy"}
    preset = page_kit.report(policies=[hmp.Policy.load("habana").to_dict()], never_called=["dropout3d"])
    assert 'hmp.Policy.load("habana")' in advice.advices(preset).code


def test_taking_an_op_off_a_list_takes_off_all_names_that_it_follows() -> None:
    habana = hmp.Policy.load("habana")
    changes = advice._taken_off(habana, "fp32", "truediv")
    assert {change.name for change in changes} == {"truediv", "div"}  # then div is on the promote list
    tried = habana.replace(fp32=habana.fp32 - {change.name for change in changes})
    assert hmp.explain("truediv", tried).cast != "fp32"
    o2 = hmp.Policy.load("habana-o2")  # its FP32 list is `*`: nothing can be taken off
    assert [f"{c.sign}{c.cast} {c.name}" for c in advice._taken_off(o2, "fp32", "softmax")] == ["+promote softmax"]


def test_no_advice_without_one_policy_that_is_known_here_and_times() -> None:
    unknown = {"name": "x", "bf16": ["no_such_op"], "fp32": [], "promote": [], "dtype": "bfloat16", "fingerprint": ""}
    for policies in ([], [page_kit.POLICY.to_dict(), hmp.Policy.load("bert").to_dict()], [unknown]):
        found = advice.advices(page_kit.report(policies=policies))
        assert found.nothing and not found.items
    row = page_kit.row("linear", "bf16", ("float32", "bfloat16", "bfloat16"), "net", 1, traced=2, casts=2)
    report = page_kit.report((row,))
    assert "seen only by a compiler" in report.notes[0]
    assert not advice.advices(report).items


def test_the_tree_has_the_sums_of_what_is_below() -> None:
    tree = model.tree(page_kit.ROWS)
    layer = tree.branches["net"].branches["layer"].branches["0"]
    assert (layer.sums.calls, layer.sums.casts, layer.sums.casts_saved, layer.sums.cast_bytes) == (10, 6, 0, 4608)
    assert (layer.sums.cast_seconds, layer.sums.op_seconds) == (pytest.approx(0.08), pytest.approx(0.323))
    assert tree.sums.casts == sum(row.casts for row in page_kit.ROWS)


def test_to_html_writes_a_recording_with_its_trace_and_returns_the_path(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with hmp.casts("habana"), hmp.record() as report:
        net(torch.ones(2, 4)).softmax(-1)
    written = report.to_html(tmp_path / "report.html")
    assert written == tmp_path / "report.html"
    html = written.read_text(encoding="utf-8")
    text = said(html)
    # of which model, when, with what: 4 x 8 + 8 + 8 x 2 + 2 parameters
    for each in ("habana", "test_page.py", "58 float32", "232 B", "Sequential", f"{datetime.now():%Y-%m-%d}", torch.__version__):
        assert each in text, each
    (trace,) = [url for url in Page(html).urls if url.startswith("data:application/gzip;base64,")]
    values = json.loads(gzip.decompress(base64.b64decode(trace.partition(",")[2])))
    assert values == json.loads(report.to_trace(tmp_path / "trace.json").read_text(encoding="utf-8"))


def test_the_page_shows_models_and_what_they_keep_layers_together() -> None:
    kept = {f"encoder.layer.{at}.self": 1024 for at in range(3)} | {"0": 512, "1": 256} | {f"{name}.head": 8 for name in "abcdefghijklm"}
    models = (
        Model("Net", {"float32": 12_345_678, "bfloat16": 10}, 10, 2**26, kept),
        Model("Teacher", {"float32": 5}, 0, 20, None, 3),
    )
    text = said(report_page(page_kit.report((), models=models)))
    assert "12,345,678" in text and "64.0 MiB" in text and "3.9 KiB" in text and "Teacher" in text
    assert "encoder.layer.*.self (3 modules) 3.0 KiB 78 %" in text


def test_the_comparison_shows_errors_and_what_to_try() -> None:
    text = said(page_of("comparison"))
    for each in ("mine", "0.04", "1.0e-5", "Try mul on the FP32 list", "70 %", "Try linear on the FP32 list"):
        assert each in text, each
    assert "native_odd" not in text  # no list may hold it
    row = replace(page_kit.comparison().rows[0], op="add", dtype="float32", listed="promote", isolated=1e-7, share=1.0)
    wide = page_kit.comparison(advice=(("add", 1.0),), rows=(row,))
    assert "Try add on the FP32 list" not in said(comparison_page(wide))  # it computes in float32


def test_a_search_shows_what_was_tried_and_the_lists_with_their_reasons() -> None:
    result = tune_result_kit.result()
    text = said(page_of("tuning"))
    for each in (
        result.policy.fingerprint,
        "0.62 of float32's", "33.1 ms",  # of a step
        "0.71", "5.0 MiB",  # of what it keeps
        "0.10% worse", "2.002", "0.11% worse", "0.909", "0.9991",  # loss, metric, gradients
        'hmp.convert(policy="tuned")',
        "linear gain 3.1 ms a step", "log gains less than 0.5%", "gives NaN or Inf in bfloat16", "no: loss +4.00%, 1.00% allowed",
    ):  # fmt: skip
        assert each in text, each
    small = tuning_page(tune_result_kit.result(objective="memory", predicted=-(2.0**21), left=2.0**20, stopped="budget"))
    assert "bytes kept for backward, float32 = 1" in small and "budget is spent" in said(small)


def test_worse_is_worse_for_a_loss_and_for_a_metric() -> None:
    result = tune_result_kit.result()
    better = replace(result.best, loss=1.98, loss_change=-0.01, metric=0.92, metric_change=-0.011)
    trials = tuple(better if trial is result.best else trial for trial in result.trials)
    text = said(tuning_page(replace(result, best=better, trials=trials, units=())))
    assert "loss 1.00% better" in text and "metric 1.10% better" in text


def test_a_notebook_shows_what_print_does_and_of_a_policy_its_lists_too() -> None:
    report, rule, policy = page_kit.report(), hmp.explain("softmax", "habana"), hmp.Policy.load("habana")
    for each in (report, rule, policy):
        assert said(each._repr_html_()).startswith(" ".join(str(each).split()))
    assert "bf16: addmm, batch_norm, " in said(policy._repr_html_())
    assert "<script" not in report._repr_html_() and "<style" not in report._repr_html_()


def verdict(html: str) -> str:
    found = re.search(r'<p id="verdict">(.*?)</p>', html, re.DOTALL)
    assert found is not None
    return said(f"<p>{found[1]}</p>")


@pytest.mark.parametrize(
    ("page", "told"),
    [
        # in bfloat16: linear 4, mul 2, layer_norm 2, max_pool2d 3, view 2; 130 ms of 681 ms are casts
        ("report", ("13 of 24 calls", "19 %", "6 changes")),
        ("empty", ("No policy decided any of 0 calls",)),
        ("comparison", ("mine", "4 %", "0.001 %", "0.61 %", "mul makes 70 %")),
        ("exact comparison", ("0 %", "no op")),
        ("infinite comparison", ("gradient cannot be compared",)),
        ("tuning", ("0.62", "2 of 9 units", "0.10% worse", "0.11% worse")),
        ("tuning for nothing", ("Stay in float32",)),
    ],
)
def test_a_page_says_first_what_was_found(page: str, told: tuple[str, ...]) -> None:
    first = verdict(page_of(page))
    assert all(each in first for each in told), first
