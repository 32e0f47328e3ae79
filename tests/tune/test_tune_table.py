"""A search's result as text, to the letter, and what of it depends on how the search ended."""

from __future__ import annotations

from pathlib import Path

import pytest

import hmp
import tune_result_kit
from hmp.tune.tolerance import Tolerance

GOLDEN = Path(__file__).parents[1] / "support" / "golden" / "tune.txt"


def test_the_table_is_the_golden_one() -> None:
    assert str(tune_result_kit.result()) + "\n" == GOLDEN.read_text(encoding="utf-8")
    assert repr(tune_result_kit.result()) == str(tune_result_kit.result())


def test_a_result_without_units_trains_or_metric_is_a_table() -> None:
    bare = tune_result_kit.trial("nothing low", ())
    text = str(
        tune_result_kit.result(
            units=(),
            trials=(tune_result_kit.FLOAT32, bare),
            best=bare,
            policy=hmp.Policy(),
            steps=0,
            predicted=0.0,
            notes=(),
            tolerance=Tolerance(),
        )
    )
    assert text.splitlines()[:6] == [
        "hmp tune: the fastest lists with no bound",
        "cpu, torch 2.13.0, seed 0, nothing is trained, from habana",
        "",
        "bf16     nothing",
        "fp32     nothing",
        "promote  nothing",
    ]
    assert (
        text.splitlines()[-1]
        == "chosen: nothing low: loss +0.00%, time not measured; no change of one unit made it cheaper within the tolerance"
    )


@pytest.mark.parametrize(
    ("stopped", "told"),
    [
        ("budget", "the budget is spent; a larger one goes on from here"),
        ("interrupted", "interrupted; the same call goes on from here"),
    ],
)
def test_how_it_ended_is_said(stopped: str, told: str) -> None:
    assert f"0.62 of float32's time; {told}\n" in str(tune_result_kit.result(stopped=stopped))


def test_no_gain_is_called_that() -> None:
    slow = tune_result_kit.trial("slow", ("linear",), ratio=1.25)
    assert "1.25 of float32's time, which is no gain here;" in str(tune_result_kit.result(best=slow))
    assert "0.71 of float32's bytes;" in str(tune_result_kit.result(objective="memory", predicted=-(2.0**21), left=2.0**20))
