"""The evidence on FP8: what is counted as found, what the page says, and that the command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from benchmarks.tuning import in_fp8
from benchmarks.tuning.tasks import MODELS, PLANTED


def found(name: str, share: float, change: float, **more: Any) -> in_fp8.Found:
    values = {
        "culprits": [], "culprits low": [], "able": 0.9, "units": 3, "of units": 4, "trials": 20, "alone": [0.061], "notes": [],
        "seconds": 1.0, "changes": [change, 0.1], "nudged": 0.05,
    }  # fmt: skip
    return {"name": name, "share": share, **values, **more}


def test_more_than_half_within_two_per_cent_counts() -> None:
    nine = [found(f"good{at}", 0.51, 0.02) for at in range(6)]
    nine[0]["changes"][1] = 0.02
    nine += [found("half", 0.5, 0.0), found("away", 0.9, 0.021), found("planted", 0.0, 0.0, culprits=["mul"])]
    (aim, planted) = in_fp8.rows(nine)
    names = ", ".join(f"good{at}" for at in range(6))
    assert (aim.result, aim.met) == (f"6 of 9: {names}; with another seed too 1: good0", True)
    assert (planted.result, planted.met) == ("all 1 in float32", True)
    nine[0]["share"] = 0.4
    nine[-1]["culprits low"] = ["mul"]
    (aim, planted) = in_fp8.rows(nine)
    assert aim.met is False
    assert (planted.result, planted.met) == ("planted: mul", False)


def test_less_than_nine_tasks_decide_nothing() -> None:
    (aim,) = in_fp8.rows([found("one", 0.9, 0.0)])
    assert aim.met is None


def test_the_page_has_a_line_for_each_task_and_the_reasons() -> None:
    page = in_fp8.report([found("gpt2", 0.99, 0.001, notes=["why"]), found("none", 0.0, 0.0, alone=[])], {"device": "cpu"}, "command")
    assert page.startswith("# What FP8 can compute\n\n`command`, 2 s. Written by the command.\n\n- device: cpu\n")
    assert "| gpt2 | 90% | 99% | 3 of 4 | 0.10 % away | 10.00 % away | 5.00 % away | +6.10 % | 20 |" in page
    assert "| none | 90% | 0% | 3 of 4 | 0.00 % away | 10.00 % away | 5.00 % away | - | 20 |" in page
    assert page.endswith("\n- gpt2: why\n")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", in_fp8.PADDED)
def test_padded_classes_give_products_that_fp8_takes(name: str) -> None:
    task = in_fp8.TASKS[name]
    batch = next(iter(task.batches(0)))
    in_fp8_there = {}
    for side, made in (("padded", task), ("as written", (MODELS | PLANTED)[name])):
        with hmp.casts(hmp.Policy(fp8=["linear", "matmul"])), hmp.record() as report:
            task.loss(made.model(0), batch)
        in_fp8_there[side] = any("float8" in row.compute for row in report.rows)
    assert in_fp8_there == {"padded": True, "as written": False}


@pytest.mark.nightly
def test_the_command_searches_and_writes(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert in_fp8.main(["--only", "rotary", "--only", "low-loss", "--write", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(before)
    rotary, low_loss = json.loads((tmp_path / "fp8.json").read_text(encoding="utf-8"))["tasks"]
    assert rotary["share"] > 0.5
    assert rotary["changes"][0] <= 0.02
    assert rotary["culprits low"] == low_loss["culprits low"] == []
    assert "| rotary | " in (tmp_path / "FP8.md").read_text(encoding="utf-8")
