"""The page of a report: what it says and says first, that it is one small file that needs nothing else, and no HTML of names."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

import hmp
import page_kit
import tune_result_kit
from page_kit import Page, html_of, said

BARE = {"rows": (), "loss": None, "trials": None}
NOTHING = replace(tune_result_kit.bare(), best=tune_result_kit.FLOAT32)
TUNED = tune_result_kit.result()
BETTER = replace(TUNED.best, loss=1.98, loss_change=-0.01, metric=0.92, metric_change=-0.011)
MINE = page_kit.comparison()
BOTH = replace(
    MINE, gradient_packed=0.0123,
    against=replace(MINE, policy="other", output=0.5, rows=(*MINE.rows, replace(MINE.rows[0], op="odd", isolated=0.25))),
)  # fmt: skip
KEPT = {f"encoder.layer.{at}.self": 1024 for at in range(3)} | {"0": 512, "1": 256} | {f"{name}.head": 8 for name in "abcdefghijklm"}
MODELS = (
    page_kit.of_report("models", "Net", {"float32": 12_345_678, "bfloat16": 10}, 10, 2**26, KEPT),
    page_kit.of_report("models", "Teacher", {"float32": 5}, 0, 20, None, 3),
)
# A result, what its page says first, and what it says somewhere.
PAGES = {
    # in bfloat16: linear 4, mul 2, layer_norm 2, max_pool2d 3, view 2; 130 ms of 681 ms are casts; for want of a kernel, and never called
    "report": (
        page_kit.report(), ("13 of 24 calls", "19 %"),
        (f"fingerprint {page_kit.POLICY.fingerprint}", "130 ms", "551 ms", "24 calls, 17 decided by hmp",
         "in float32, as 2 of 2 calls had no kernel (R11)",
         "max_pool1d"),
    ),
    "models": (
        page_kit.report((), models=MODELS), (),
        ("12,345,678", "64.0 MiB", "3.9 KiB", "Teacher"),
    ),
    "empty": (hmp.types.Report(), ("No policy applied to any of 0 calls",), ()),
    "comparison": (
        page_kit.comparison(gradient=0.0061), ("mine", "the error of the output is 0.04", "gains most in float32"),
        ("0.04", "1.0e-5", "2.25 became 2.5", "0.0061", "(output 0.04 becomes 0.01), linear (gradient inf becomes 0.7)",
         "(output 0.04 becomes 0.001), within the tolerance of 0.0039", "not tried: 12 more moves", "raised KeyError"),
    ),
    "exact comparison": (page_kit.comparison(**BARE, output=0.0, gradient=None), ("the error of the output is 0.",), ()),
    "infinite comparison": (page_kit.comparison(**BARE, output=None, gradient=math.inf), ("the output is -",), ("inf",)),
    "two policies": (
        BOTH, (),
        ("mine and other against float32", "0.5 under other", "Under other the error", "By op under other", "odd 3 0.25", "0.012 "),
    ),
    "captures": (
        page_kit.captures(), (),
        ("layers.0.a (Linear): by 0.002", "0.05", "policy 'habana'", "A note.", f"layers.0.{page_kit.NASTY}", "shapes [2] and [3]"),
    ),
    "tuning": (
        TUNED, ("0.62", "2 of 9 units", "0.10% worse", "0.11% worse"),
        (TUNED.policy.fingerprint, "0.62 of float32's", "33.1 ms", "5.0 MiB", "2.002", "0.909",
         'hmp.apply(model, "tuned")', "3.1 ms 9 ms 0.0012 +0.01% chosen", "50 µs 100 µs 0.0012 +0.01% gains too little",
         "gives NaN or Inf", "no: loss +4.00%, 1.00% allowed"),
    ),
    "tuning for memory": (tune_result_kit.result(objective="memory", stopped="budget"), (), ("budget is spent",)),
    "tuning for better": (
        replace(TUNED, best=BETTER, trials=tuple(BETTER if trial is TUNED.best else trial for trial in TUNED.trials), units=()), (),
        ("loss 1.00% better", "metric 1.10% better"),
    ),
    "tuning for nothing": (NOTHING, ("Stay in float32",), ()),
}  # fmt: skip


@functools.cache
def page_of(name: str) -> str:
    """To draw its charts takes half a second."""
    return html_of(PAGES[name][0])


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_one_well_formed_file_that_asks_for_no_other(name: str) -> None:
    html = page_of(name)
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert all(url.startswith(("#", "data:")) for url in page.urls)
    assert {url[1:] for url in page.urls if url[0] == "#"} <= set(page.ids)
    assert all(head.get("scope") in ("col", "row") for head in page.heads)
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"https?:|//www|url\((?!#)|@import", without_names)
    assert "default-src 'none'" in html


def test_names_are_text_and_never_html() -> None:
    nasty = page_kit.NASTY
    named = (f"op{nasty}", "bf16", f"x{nasty} (/a/{nasty}:1)", "float32", f"float32{nasty}", "$x$", f"net.{nasty}", f"/{nasty}")
    rows = [
        page_kit.of_report("rows", *named, 1, 1, 1, 0, 1, 1.0, 1.0),
        page_kit.of_report("rows", "--><b>&amp;", "unlisted", "", "", "", "", "]]><i>", "", 0, 1, 0, 0, 0, 1.0),
    ]
    policy = {"name": nasty, "bf16": [nasty], "fp32": [], "promote": [], "dtype": "bfloat16", "fingerprint": nasty}
    report = page_kit.report(tuple(rows), policies=[policy], never_called=[nasty], device=nasty)
    rule = hmp.types.Rule(nasty, "bf16", nasty, nasty, nasty, 1, (f"{nasty}: {nasty}",), (nasty,), nasty)
    for html in (
        html_of(report),
        page_of("comparison"),
        page_of("captures"),
        html_of(tune_result_kit.nasty(nasty)),
        report._repr_html_(),
        rule._repr_html_(),
        hmp.Policy(nasty)._repr_html_(),
    ):
        assert nasty not in html
        assert "<b>&amp;" not in html.replace("<b>&amp;lt;", "") and "<i>]]" not in html and "]]><i>" not in html
        assert "alert(1)" in Page(html).text


def test_to_html_writes_a_recording_and_returns_the_path(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with hmp.casts("habana"), hmp.record() as report:
        net(torch.ones(2, 4)).softmax(-1)
    written = report.to_html(tmp_path / "report.html")
    assert written == tmp_path / "report.html"
    text = said(written.read_text(encoding="utf-8"))
    # of which model, when, with what: 4 x 8 + 8 + 8 x 2 + 2 parameters
    for each in ("habana", "test_page.py", "58 float32", "232 B", "Sequential", f"{datetime.now():%Y-%m-%d}", torch.__version__):
        assert each in text, each


def test_a_notebook_shows_what_print_does_and_of_a_policy_its_lists_too() -> None:
    report, rule, policy = page_kit.report(), hmp.explain("softmax", "habana"), hmp.Policy.load("habana")
    for each in (report, rule, policy):
        assert said(each._repr_html_()).startswith(" ".join(str(each).split()))
    assert "bf16: addmm, batch_norm, " in said(policy._repr_html_())
    assert "<script" not in report._repr_html_() and "<style" not in report._repr_html_()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_first_what_was_found_and_then_all_of_it(name: str) -> None:
    _, first, anywhere = PAGES[name]
    html = page_of(name)
    (verdict,) = re.findall(r'<p id="verdict">(.*?)</p>', html, re.DOTALL)
    assert [each for each in first if each not in said(f"<p>{verdict}</p>")] == []
    assert [each for each in anywhere if each not in said(html)] == []
    assert ("By op under other" in said(html)) is ("by packing alone" in said(html)) is (name == "two policies")
