"""A report made by hand, for the page; and what a reader sees of a page."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hmp
from hmp.tools.compare.comparison import Comparison, ErrorRow, Move, MoveTrial, Trials
from hmp.tools.traces.compare import CaptureComparison, Computed, Gap, Side

LOW, WIDE = "bfloat16", "float32"
FILE = "/home/somebody/model.py"
NASTY = "<script>alert(1)</script>"


FIELDS = {
    "rows": "op rule source inputs compute output module file line calls casts casts_saved cast_bytes op_seconds cast_seconds "
    "no_kernel raised",
    "violations": "op source wanted got kind by module file line calls",
    "models": "name parameters trainable parameter_bytes kept count kept_weight_bytes",
}


def of_report(kind: str, *values: Any, **named: Any) -> Any:
    """A row, a model or a violation of a report, as they are read from its JSON."""
    given = dict(zip(FIELDS[kind].split(), values, strict=False)) | named
    report = hmp.types.Report.from_dict({"hmp_report": 1, "rows": [], kind: [given]})
    return (report.violations() if kind == "violations" else getattr(report, kind))[0]


def row(op: str, rule: str, dtypes: tuple[str, str, str], module: str, line: int, **counted: Any) -> Any:
    return of_report("rows", op, rule, counted.pop("source", ""), *dtypes, module, FILE, line, counted.pop("calls", 2), **counted)


def html_of(result: Any) -> str:
    """The page that a report, a comparison or a search writes."""
    with tempfile.TemporaryDirectory() as folder:
        return Path(result.to_html(Path(folder) / "page.html")).read_text(encoding="utf-8")


ROWS = (
    row("linear", "bf16", (WIDE, LOW, LOW), "net.layer.0.query", 10, casts=4, cast_bytes=4096, op_seconds=0.2, cast_seconds=0.05,
        source="linear (/lists/mine/bf16.txt:1)"),
    row("linear", "bf16", (f"{LOW}, {WIDE}", LOW, LOW), "net.layer.1.query", 10, casts=2, casts_saved=2, cast_bytes=2048,
        op_seconds=0.2, cast_seconds=0.02, source="linear (/lists/mine/bf16.txt:1)"),
    row("tanh", "fp32", (LOW, WIDE, WIDE), "net.layer.0", 11, casts=2, cast_bytes=512, op_seconds=0.001, cast_seconds=0.03,
        source="tanh (/lists/mine/fp32.txt:1)"),
    row("cross_entropy", "fp32", (LOW, WIDE, WIDE), "", 30, calls=1, casts=1, cast_bytes=64, op_seconds=0.001, cast_seconds=0.02,
        source="cross_entropy (/lists/mine/fp32.txt:2)"),
    row("mul", "bf16", (WIDE, LOW, LOW), "net.rotary", 12, casts=4, cast_bytes=256, op_seconds=0.002, cast_seconds=0.01,
        source="mul (/lists/mine/bf16.txt:2)"),
    row("relu", "unlisted", (WIDE, WIDE, WIDE), "net.layer.0", 13, op_seconds=0.1),
    row("add", "promote", (f"{LOW}, {WIDE}", WIDE, WIDE), "net.layer.0", 14, op_seconds=0.002),
    row("layer_norm", "R7", (WIDE, WIDE, WIDE), "net.layer.0.norm", 15, op_seconds=0.02, label="first input"),
    row("layer_norm", "R7", (LOW, LOW, LOW), "net.layer.1.norm", 15, op_seconds=0.02, label="first input"),
    row("cdist", "bf16", (LOW, WIDE, LOW), "net.head", 16, no_kernel=2, op_seconds=0.001, source="cdist (/lists/mine/bf16.txt:3)"),
    row("max_pool2d", "unlisted", (LOW, LOW, LOW), "net.head", 17, calls=3, op_seconds=0.004),
    row("view", "unlisted", (LOW, LOW, LOW), "net.head", 18, op_seconds=0.0001),
)  # fmt: skip
POLICY = hmp.Policy("mine", bf16={"linear", "mul", "cdist", "max_pool1d"}, fp32={"tanh", "cross_entropy"}, promote={"add"})


def report(rows: tuple[Any, ...] = ROWS, **about: Any) -> hmp.types.Report:
    told = {"policies": [POLICY.to_dict()], "never_called": ["max_pool1d"], "uncast_calls": 7, "seconds": 1.5, "torch": "2.13.0"}
    return hmp.types.Report(rows, **(told | about))


def comparison(**changes: Any) -> Comparison:
    """A comparison made by hand; ranked as compare() has its rows, not in the order of calls."""
    forward = [
        ("embedding", "net.embed", WIDE, "fp32", 1e-8, 1e-8, 0.0), ("linear", "net.0", LOW, "bf16", 0.002, 0.002, 0.2),
        ("mul", f"net.{NASTY}", LOW, "bf16", 0.03, 0.03, 0.7), ("softmax", "net.1", WIDE, "fp32", 2e-8, 0.031, 0.0),
        ("linear", "net.1", LOW, "bf16", 0.003, 0.04, 0.1),
    ]  # fmt: skip
    rows = [
        ErrorRow(op, op, "forward", module, dtype, listed, 3, 3, own, accumulated, share)
        for op, module, dtype, listed, own, accumulated, share in forward
    ]
    rows += [replace(row, direction="backward", accumulated=math.inf, isolated=None, share=0.0) for row in rows]
    values = {
        "policy": "mine", "output": 0.04, "loss": 1e-5, "gradient": math.inf, "loss_value": 2.5, "loss_source": "the output's own loss",
        "float32_loss_value": 2.25, "notes": ("One batch.",),
        "trials": Trials(
            MoveTrial((), 0.04, 1e-5, math.inf),
            (MoveTrial((Move(f"mul @ net.{NASTY}", "fp32"),), 0.01, 1e-5, 0.5), MoveTrial((Move("linear", "fp32"),), 0.039, 1e-5, 0.7),
             MoveTrial((Move("cos @ net.1", "fp32"),), why_not=f"raised KeyError: {NASTY}")),
            MoveTrial((Move(f"mul @ net.{NASTY}", "fp32"), Move("linear", "fp32")), 0.001, 1e-5, 0.5), 0.0039, 12),
        "rows": tuple(sorted(rows, key=lambda row: -(row.isolated or 0.0))),
    }  # fmt: skip
    return Comparison(**values | changes)


SIDE = Side("trainer", "trainer.capture", ("habana",), {"model": "Net"})
IN_WIDE, IN_LOW = Computed((WIDE,), (WIDE,), WIDE, (2, 4)), Computed((WIDE,), (LOW,), LOW, (2, 4))


def _gap(module: str, relative: float | None, is_leaf: bool = True, why: str = "", **changes: object) -> Gap:
    how = "" if relative is None else "values"
    return replace(Gap(module, module, "Linear", 0, 0, is_leaf, "", IN_WIDE, IN_LOW, relative, how, why), **changes)


GAPS = (
    _gap("(inputs)", 0.0, kind="", output="x"),
    _gap("layers.0.a", 0.002),
    _gap(f"layers.0.{NASTY}", 0.2),
    _gap("layers.0", 0.01, False),
    _gap("layers.1.a", float("inf")),
    _gap("layers.1", 0.02, False),
    _gap("odd", None, why="shapes [2] and [3]"),
    _gap("", 0.05, False, output="y"),
)


def captures() -> CaptureComparison:
    """A comparison of two captures made by hand."""
    return CaptureComparison(SIDE, replace(SIDE, name=NASTY), GAPS, notes=("A note.",))


BLOCKS = set("td th dt dd li p h1 h2 h3 div summary text option button title a".split())
VOID = {"meta", "link", "input", "br", "wbr", "img"}


class Page(HTMLParser):
    """The text of a page by section, its ids, its URLs; fails where elements do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.urls: list[str] = []
        self.heads: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        self.urls += [str(value) for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag == "th":
            self.heads.append(values)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
        if tag in BLOCKS:
            self.text += " "

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def said(html: str) -> str:
    """What a reader sees, in one line."""
    return " ".join(Page(html).text.replace("\u00a0", " ").split())
