"""Report.to_trace(): the calls and casts of a recording as slices, beside what a dispatch mode of plain torch sees."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from hmp.report import trace
from thread_kit import in_thread

ONES = torch.ones(2, 2)
POLICY = hmp.Policy("mine", bf16={"linear"}, fp32={"softmax"})


class Casts(TorchDispatchMode):
    """Notes every cast that is computed, as plain torch shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.made.append(f"cast {args[0].dtype} to {result.dtype}".replace("torch.", ""))
        return result


def slices(path: Path) -> list[dict[str, Any]]:
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = values["traceEvents"]
    for each in events:  # what the Trace Event Format asks of a complete event
        assert each["ph"] == "X"
        assert each["ts"] >= 0 and each["dur"] >= 0
        assert isinstance(each["pid"], int) and isinstance(each["tid"], int)
        assert each["cat"] in ("op", "cast")
    assert [each["ts"] for each in events] == sorted(each["ts"] for each in events)
    return events


def test_ops_and_casts_are_slices_and_casts_stand_inside_their_ops(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Softmax(-1))
    x = torch.randn(2, 4)
    with hmp.casts(POLICY), hmp.record() as report, Casts() as plain:
        model(x)
    found = slices(report.to_trace(tmp_path / "trace.json"))
    assert [each["name"] for each in found if each["cat"] == "op"] == ["linear", "tanh", "softmax"]
    assert [each["name"] for each in found if each["cat"] == "cast"] == plain.made
    assert len(plain.made) == 4, "input, weight and bias for linear, and back for softmax"
    linear, tanh, softmax = (each for each in found if each["cat"] == "op")
    assert linear["args"] == {"rule": "bf16", "computes": "bfloat16", "module": "0"}
    assert (tanh["args"]["rule"], softmax["args"]["computes"]) == ("unlisted", "float32")
    for each in found:
        if each["cat"] == "cast":
            op = softmax if each["name"].endswith("float32") else linear
            assert op["ts"] <= each["ts"] and each["ts"] + each["dur"] <= op["ts"] + op["dur"] + 0.01
    assert linear["ts"] + linear["dur"] <= tanh["ts"] + 0.01 and tanh["ts"] + tanh["dur"] <= softmax["ts"] + 0.01


def test_threads_have_lines_of_their_own(tmp_path: Path) -> None:
    def work() -> None:
        with hmp.casts(POLICY):
            F.linear(ONES, ONES)

    with hmp.record() as report:
        work()
        in_thread(work)
    found = slices(report.to_trace(tmp_path / "trace.json"))
    assert len({each["tid"] for each in found if each["name"] == "linear"}) == 2


def test_slices_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST", 5)
    with hmp.casts(POLICY), hmp.record() as report:
        for _ in range(4):
            F.linear(ONES, ONES)
    file = report.to_trace(tmp_path / "trace.json")
    assert len(slices(file)) == 5
    assert json.loads(file.read_text())["otherData"]["slices_left_out"] == 4 * 3 - 5
    assert sum(row.calls for row in report.rows) == 4
    monkeypatch.setattr(trace, "MOST_BYTES", 220)
    assert report.slices is not None
    data, shown = trace.packed(report.slices, report.about)
    values = json.loads(gzip.decompress(data))
    assert (len(data) <= 220, shown, values["otherData"]["slices_left_out"]) == (True, len(values["traceEvents"]), 12 - shown)
    assert 0 < shown < 5


def test_a_report_without_single_calls_says_so(tmp_path: Path) -> None:
    with hmp.casts(POLICY), hmp.record() as report:
        F.linear(ONES, ONES)
    loaded = hmp.Report.load(report.to_json(tmp_path / "report.json"))
    for other in (loaded, report.merge(loaded)):
        with pytest.raises(hmp.HmpError, match=r"holds no single calls; call to_trace\(\) on what record\(\) gave"):
            other.to_trace(tmp_path / "trace.json")
