"""The page of a report: what it says and says first, that it is one small file that needs nothing else, and no HTML of names."""

from __future__ import annotations

import base64
import gzip
import json
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
from hmp.report.models import Model
from hmp.report.page import advice, model, report_page, trade_off
from hmp.report.rows import Row
from hmp.tune.page import tuning_page
from hmp.tune.result import result_of
from page_kit import Page, said


@pytest.fixture(scope="module")
def html() -> str:
    return report_page(page_kit.report())


PAGES = {
    "report": lambda: report_page(page_kit.report()),
    "comparison": lambda: comparison_page(page_kit.comparison()),
    "empty": lambda: report_page(hmp.Report()),
    "bare comparison": lambda: comparison_page(page_kit.comparison(rows=(), output=None, loss=None, gradient=None, advice=())),
    "tuning": lambda: tuning_page(tune_result_kit.result()),
    "bare tuning": lambda: tuning_page(tune_result_kit.bare()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_one_well_formed_file_that_asks_for_no_other(name: str) -> None:
    html = PAGES[name]()
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert all(url.startswith("#") or url == "data:," for url in page.urls)
    assert {url[1:] for url in page.urls if url[0] == "#"} <= set(page.ids)
    assert all(head.get("scope") in ("col", "row") for head in page.heads)
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"https?:|//www|url\((?!#)|@import", without_names)
    assert "default-src 'none'" in html
    assert "var(--" in html and not re.search(r"#0101\d\d", html)


def test_a_place_names_the_modules_that_had_its_dtypes_alone() -> None:
    report = page_kit.report()
    modules = {row.inputs: model.modules_of(report, row) for row in model.cast_places(report) if row.op == "linear"}
    assert modules == {"float32": "net.layer.0.query", "bfloat16, float32": "net.layer.1.query"}


def test_the_page_says_what_was_in_force_and_where_the_time_went(html: str) -> None:
    text = said(html)
    assert f"policy mine {page_kit.POLICY.fingerprint}" in text
    assert "in casts 130 ms 19 % of the time in ops and casts" in text
    assert "in ops 551 ms 24 calls, 17 by a rule" in text
    assert "Most cast time: linear (54 %), tanh (23 %), cross_entropy (15 %)." in text
    assert "The line with most of it: model.py:10, linear in net.layer.*.query (2 modules), 54 %." in text  # of both dtypes
    assert "7 calls ran where no casts are in force" in text
    assert "cdist: 2 of 2 calls, listed as cdist (mine/bf16.txt:3)" in text
    assert "bf16.txt: 1 max_pool1d" in text
    assert "relu fp32→fp32→fp32 2 100 ms 15 % BF16: habana, resnet50" in text


def test_an_op_that_torch_promotes_computes_in_the_dtype_of_its_result(html: str) -> None:
    low, wide = torch.rand(2, 2).bfloat16() + 1, torch.rand(2, 2) + 1
    with hmp.casts(page_kit.POLICY), hmp.record() as report:
        torch.add(low, wide)
        torch.igamma(low, wide)  # hmp stands in for it, for want of a kernel (R11)
    assert {row.op: row.compute for row in report.rows} == {"add": "float32", "igamma": "float32"}
    for page in (html, report_page(report)):
        assert "add promote bf16fp32→fp32→fp32" in said(page)


def test_what_to_change_is_said_in_lines_to_copy() -> None:
    found = advice.advices(page_kit.report())
    assert {item.title: [f"{c.sign}{c.cast} {c.name}" for c in item.changes] for item in found.items} == {
        "Try relu on the BF16 list": ["+bf16 relu"],
        "Try add on the BF16 list": ["+bf16 add"],
        "Settle layer_norm: try it on the BF16 list": ["+bf16 layer_norm"],
        "Try tanh off the FP32 list": ["-fp32 tanh"],
        "Try mul off the BF16 list": ["-bf16 mul"],
        "Take cdist off the BF16 list": ["-bf16 cdist"],
    }
    assert [item.seconds for item in found.items] == sorted((item.seconds for item in found.items), reverse=True)
    tanh = next(item for item in found.items if "tanh" in item.title)
    assert tanh.seen == "2 calls got bfloat16; casting it to float32 took longer than computing (30 ms and 1 ms)."
    assert tanh.stake == "30 ms in its casts, 4.4 % of the time in ops and casts"
    assert [line.partition(":")[0] for line in found.left] == ["cross_entropy", "linear"]
    policy = page_kit.POLICY
    values = {"hmp": hmp}
    exec(
        found.code.replace("policy = ...", "policy = given").replace("tried.save", "(lambda folder: None)"),
        values | {"given": policy},
        values,
    )
    tried = values["tried"]
    assert isinstance(tried, hmp.Policy)
    assert tried.bf16 == (policy.bf16 - {"mul", "cdist"}) | {"relu", "add", "layer_norm"}
    assert tried.fp32 == {"cross_entropy"}


def test_taking_an_op_off_a_list_takes_off_all_names_that_it_follows() -> None:
    habana = hmp.Policy.load("habana")
    changes = advice._taken_off(habana, "fp32", "truediv")
    assert {change.name for change in changes} == {"truediv", "div"}  # then div is on the promote list
    tried = habana.replace(fp32=habana.fp32 - {change.name for change in changes})
    assert hmp.explain("truediv", tried).cast != "fp32"
    o2 = hmp.Policy.load("habana-o2")  # its FP32 list is `*`: nothing can be taken off
    assert [f"{c.sign}{c.cast} {c.name}" for c in advice._taken_off(o2, "fp32", "softmax")] == ["+promote softmax"]


def test_a_preset_that_is_in_force_is_loaded_by_its_name() -> None:
    report = page_kit.report(policies=[hmp.Policy.load("habana").to_dict()], never_called=["dropout3d"])
    assert advice.advices(report).code.startswith('policy = hmp.Policy.load("habana")\ntried = policy.replace(\n')


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([], "No policy was in force."),
        ([page_kit.POLICY.to_dict(), hmp.Policy.load("bert").to_dict()], "More than one policy was in force."),
        ([{"name": "x", "bf16": ["no_such_op"], "fp32": [], "promote": [], "dtype": "bfloat16", "fingerprint": ""}], "cannot be read here"),
    ],
)
def test_no_advice_without_one_policy_that_is_known_here(policies: list[dict[str, object]], message: str) -> None:
    report = page_kit.report(policies=policies)
    assert message in advice.advices(report).nothing
    assert message in said(report_page(report))


def test_calls_without_times_get_no_advice_and_a_page() -> None:
    report = page_kit.report((page_kit.row("linear", "bf16", ("float32", "bfloat16", "bfloat16"), "net", 1, traced=2, casts=2),))
    (note,) = report.notes
    assert "seen only by a compiler" in note and note in said(report_page(report))
    assert not advice.advices(report).items


@pytest.mark.slow
def test_names_are_text_and_never_html(tmp_path: Path) -> None:
    nasty = page_kit.NASTY
    rows = [Row(f"op{nasty}", "bf16", f"x{nasty} (/a/{nasty}:1)", "float32", f"float32{nasty}", "$x$", f"net.{nasty}", f"/{nasty}", 1, 1, 1,
                0, 1, 1.0, 1.0), Row("--><b>&amp;", "unlisted", "", "", "", "", "]]><i>", "", 0, 1, 0, 0, 0, 1.0)]  # fmt: skip
    policy = {"name": nasty, "bf16": [nasty], "fp32": [], "promote": [], "dtype": "bfloat16", "fingerprint": nasty}
    report = page_kit.report(tuple(rows), policies=[policy], never_called=[nasty], device=nasty)
    rule = hmp.Rule(nasty, "bf16", nasty, nasty, nasty, 1, (f"{nasty}: {nasty}",), (nasty,), nasty)
    for html in (
        report_page(report),
        comparison_page(page_kit.comparison()),
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
    text = said(html)
    assert "The 1,000 of 2,800 with most time; Report.to_json() has them all." in text
    assert re.search(r"… [\d,]+ lines with less time", text)
    many = tuple(replace(each, module=f"net.{at}") for at in range(250) for each in page_kit.comparison().rows)
    assert len(comparison_page(page_kit.comparison(rows=many)).encode()) < 2_000_000


def test_the_tree_has_the_sums_of_what_is_below_and_unfolds_the_way_to_most_casts() -> None:
    tree = model.tree(page_kit.ROWS)
    net = tree.branches["net"]
    layer = net.branches["layer"].branches["0"]
    assert list(tree.branches) == ["net", model.OUTSIDE]
    assert [row.op for row in layer.rows] == ["relu", "tanh", "add"]
    assert (layer.sums.calls, layer.sums.casts, layer.sums.casts_saved, layer.sums.cast_bytes) == (10, 6, 0, 4608)
    assert (layer.sums.cast_seconds, layer.sums.op_seconds) == (pytest.approx(0.08), pytest.approx(0.323))
    assert tree.sums.casts == sum(row.casts for row in page_kit.ROWS)
    assert layer.dtypes == ["float32", "bfloat16"]
    assert net.open and layer.open and layer.branches["query"].open


def test_to_html_writes_a_recording_and_returns_the_path(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with hmp.casts("habana"), hmp.record() as report:
        net(torch.ones(2, 4)).softmax(-1)
    written = report.to_html(tmp_path / "report.html")
    assert written == tmp_path / "report.html"
    html = written.read_text(encoding="utf-8")
    text = said(html)
    assert "policy habana" in text
    assert "test_page.py" in text
    assert "parameters 58 float32; 232 B" in text  # 4 x 8 + 8 + 8 x 2 + 2
    (trace,) = [url for url in Page(html).urls if url.startswith("data:application/gzip;base64,")]
    values = json.loads(gzip.decompress(base64.b64decode(trace.partition(",")[2])))
    assert values == json.loads(report.to_trace(tmp_path / "trace.json").read_text(encoding="utf-8"))
    again = hmp.Report.from_dict(report.to_dict())  # which holds sums alone
    assert said(report_page(again)) == re.sub(r"Call by call .* sent anywhere\. |(?<=Casts by module Models )Trace ", "", text)


def test_the_page_shows_models_and_what_they_keep_layers_together() -> None:
    kept = {f"encoder.layer.{at}.self": 1024 for at in range(3)} | {"0": 512, "1": 256} | {f"{name}.head": 8 for name in "abcdefghijklm"}
    models = (
        Model("Net", {"float32": 12_345_678, "bfloat16": 10}, 10, 2**26, kept),
        Model("Teacher", {"float32": 5}, 0, 20, None, 3),
    )
    text = said(report_page(page_kit.report(models=models)))
    assert "parameters 12.3 M 12,345,678 float32, 10 bfloat16; 64.0 MiB, of the first of 2 models" in text
    assert "kept for backward 3.9 KiB by a call of it, by module" in text
    assert "Net 12,345,688 10 fp32 12,345,678 bf16 10 64.0 MiB 3.9 KiB Teacher 3 of them 5 0 fp32 20 B -" in text
    assert "encoder.layer.*.self (3 modules) 3.0 KiB 78 % 0 512 B 13 % 1 256 B 6.5 % a.head 8 B 0.2 %" in text
    assert "\u2026 and 4 more." in text and "Kept for backward by a call of Teacher" not in text


def test_the_comparison_shows_errors_by_depth_and_what_to_try() -> None:
    html = comparison_page(page_kit.comparison())
    text = said(html)
    assert "policy mine bf16 the output's own loss" in text
    assert "error of the output 0.04 relative to float32 error of the loss 1.0e-5 of 2.5 error of the gradient inf" in text
    assert "largest error of one op 0.03 mul, by itself" in text
    assert "Try mul on the FP32 list bf16.txt \u2212 mul fp32.txt + mul 70 % of the squared errors; 0.03 at most by itself" in text
    assert "Try linear on the FP32 list" in text
    assert "native_odd" not in text  # no list may hold it
    assert "mul forward bf16 net.<script>alert(1)</script> 0.002 0.03 15" in text  # where the error grows
    assert html.count('class="chart wide"') == html.count('class="chart narrow"') == 2  # forward, and backward
    assert "accumulated" in text and "half a bfloat16 ulp" in text and "mul in net.<script>" in text


def test_a_search_shows_the_trade_off_the_units_and_the_lists_with_their_reasons(tmp_path: Path) -> None:
    result = tune_result_kit.result()
    html = result.to_html(tmp_path / "tune.html").read_text(encoding="utf-8")
    text = said(html)
    assert f"policy tuned {result.policy.fingerprint} bf16 loss within 1.00% of float32's; seed 0" in text
    assert "time of a step 0.62 of float32's 33.1 ms kept for backward 0.71 5.0 MiB of 7.0 MiB loss 0.10% worse 2.002, float32 2" in text
    assert "metric 0.11% worse 0.909, float32 0.91 cosine of the gradients 0.9991" in text
    assert "units in the low dtype 2 of 9 measured Chosen: 2 of 4 units, the fastest of 6 trials that is within the tolerance." in text
    assert 'hmp.convert(policy="tuned") # or hmp run --policy tuned script.py' in text
    assert "Not drawn, for they are not finite, far beyond, or not timed since FP8 is emulated: habana." in text
    assert html.count('class="chart wide"') == html.count('class="chart narrow"') == 2
    for words in (
        "within the tolerance",
        "beyond it",
        "chosen: 2 of 4 units",
        "1.00% allowed",
        "autocast",
        "float32",
        "time of a step, float32 = 1",
    ):
        assert f">{words}</text>" in html  # in the figure
    assert "bf16.txt line why linear gain 3.1 ms a step, error 1.2e-03, loss +0.01%, 24 calls" in text
    assert "log gains less than 0.5% of float32's time" in text and " us" not in text
    assert "2 not decided conv2d mm" in text
    assert "all units 4 2.08 +4.00% 0.88 +3.30% 0.9700 19 ms 0.57 4.0 MiB no: loss +4.00%, 1.00% allowed" in text
    assert "exp all fp32 24 9 ms - 900 µs - - inf not finite gives NaN or Inf in bfloat16, 24 calls" in text
    assert said(tuning_page(result_of(json.loads(json.dumps(result.to_dict()))))) == text


def test_a_search_for_little_memory_is_shown_by_bytes() -> None:
    html = tuning_page(tune_result_kit.result(objective="memory", predicted=-(2.0**21), left=2.0**20, stopped="budget"))
    assert ">bytes kept for backward, float32 = 1</text>" in html and ">bytes less to keep for backward</text>" in html
    assert "The budget is spent; a larger one goes on from here." in said(html)


def test_marks_of_a_search_are_told_apart_by_their_form() -> None:
    dots, crosses = [trade_off.Point(1.0, 0.0, True)], [trade_off.Point(1.0, 0.0, False)]
    forms = [re.findall(r'<path id="trade-[^"]*" d="([^"]*)"', trade_off.trade_off(points, "x", "y", 0.01)) for points in (dots, crosses)]
    assert not set(forms[0]) >= set(forms[1])
    assert "rest" not in trade_off.trade_off([*dots, *crosses], "cost", "worse", None)


def test_a_notebook_shows_what_print_does_and_of_a_policy_its_lists_too() -> None:
    report, rule, policy = page_kit.report(), hmp.explain("softmax", "habana"), hmp.Policy.load("habana")
    for each in (report, rule, policy):
        assert said(each._repr_html_()).startswith(" ".join(str(each).split()))
    assert "bf16: addmm, batch_norm, " in said(policy._repr_html_())
    assert "<script" not in report._repr_html_() and "<style" not in report._repr_html_()


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
