"""Places that a report tells apart, what its page advises and adds up, a trace that is cut to fit in, the page of compared captures.

No public call shows a page's parts as values, nor makes a comparison of captures with given distances.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
import page_kit
from hmp.captures.comparison import CaptureComparison, Computed, Gap, Side
from hmp.captures.page import captures_page
from hmp.report import bounded_places, trace
from hmp.report.page import advice, model
from page_kit import NASTY, Page, said


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


def test_slices_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST", 5)
    ones = torch.ones(2, 2)
    with hmp.casts(hmp.Policy("mine", bf16={"linear"})), hmp.record() as report:
        for _ in range(4):
            F.linear(ones, ones)
    file = report.to_trace(tmp_path / "trace.json")
    written = json.loads(file.read_text())
    assert (len(written["traceEvents"]), written["otherData"]["slices_left_out"]) == (5, 4 * 3 - 5)
    assert sum(row.calls for row in report.rows) == 4
    monkeypatch.setattr(trace, "MOST_BYTES", 220)
    assert report.slices is not None
    data, shown = trace.packed(report.slices, report.about)
    values = json.loads(gzip.decompress(data))
    assert (len(data) <= 220, shown, values["otherData"]["slices_left_out"]) == (True, len(values["traceEvents"]), 12 - shown)
    assert 0 < shown < 5


SIDE = Side("trainer", "trainer.capture", "Net", {"float32": 3}, {"float32": 2, "bfloat16": 1}, ("habana",), (), {"model": "Net"})
WIDE, LOW = Computed(("float32",), ("float32",), "float32", (2, 4)), Computed(("float32",), ("bfloat16",), "bfloat16", (2, 4))


def gap(module: str, relative: float | None, is_leaf: bool = True, why: str = "", **changes: object) -> Gap:
    how = "" if relative is None else "values"
    return replace(Gap(module, module, "Linear", 0, 0, is_leaf, "", WIDE, LOW, relative, how, why), **changes)


GAPS = (
    gap("(inputs)", 0.0, kind="", output="x"),
    gap("layers.0.a", 0.002),
    gap(f"layers.0.{NASTY}", 0.2),
    gap("layers.0", 0.01, False),
    gap("layers.1.a", float("inf")),
    gap("layers.1", 0.02, False),
    gap("odd", None, why="shapes [2] and [3]"),
    gap("", 0.05, False, output="y"),
)


def test_it_is_well_formed_and_says_what_the_comparison_says() -> None:
    comparison = CaptureComparison(SIDE, replace(SIDE, name=NASTY), GAPS, notes=("A note.",))
    html = captures_page(comparison)
    page, text = Page(html), said(html)
    assert len(page.ids) == len(set(page.ids)) and NASTY not in html
    assert all(url.startswith("#") or url == "data:," for url in page.urls) and {url[1:] for url in page.urls if url[0] == "#"} <= set(
        page.ids
    )
    for told in ("layers.0.a (Linear): 0.002", "0.05", "policy 'habana'", "A note.", f"layers.0.{NASTY}", "shapes [2] and [3]"):
        assert told in text, told


def test_a_comparison_in_which_nothing_is_apart_has_a_page() -> None:
    for gaps, verdict in (((), "may part or not"), (GAPS[:1], "do not part"), ((gap("a", None, why="shapes"),), "may part or not")):
        assert f"They {verdict}" in said(captures_page(CaptureComparison(SIDE, SIDE, gaps)))


class Disobedient(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with hmp.disable_casts():
            torch.tanh(x)
        return super().forward(x)


def test_a_script_that_makes_up_places_makes_no_endless_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first places are told apart, what is called in later ones is added up, and text and JSON say how much that is."""
    monkeypatch.setattr(bounded_places, "MOST", 40)
    with hmp.casts(hmp.Policy(fp8={"linear"}, fp32={"tanh"})), hmp.record() as report:
        for number in range(60):  # a module of a class of its own, in which two lines call ops
            type(f"Made{number}", (Disobedient,), {})(16, 16)(torch.ones(16, 16, dtype=torch.bfloat16))
    for kept, calls in (([row for row in report.rows if row.rule != "unlisted"], 60), (report.violations(), 60)):
        assert len(kept) <= 41 and sum(each.calls for each in kept) == calls
    assert len(report.fp8) <= 2 * 41 and sum(each.tensors for each in report.fp8) == 2 * 60
    (note,) = [note for note in report.notes if "beyond the first 40" in note]
    assert note in str(report)
    saved = hmp.Report.load(report.to_json(tmp_path / "report.json"))
    assert note in saved.notes and any(each.startswith(f"{2 * int(note.split()[0])} ") for each in saved.merge(report).notes)
