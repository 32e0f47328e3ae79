"""What a search says: how far it is, as a bar on a terminal with rich and lines elsewhere, and what it found, to the letter."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path

import pytest

import hmp
import tune_result_kit
from hmp.tune.progress import Bar, Lines, Progress, Silent, shown
from hmp.tune.tolerance import Tolerance


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell(progress: Progress) -> None:
    progress.stage("measuring ops")
    progress.step(7, 30, "2 of 4 units: 0.620 of float32's")
    progress.step(31, 30, "")
    progress.close()


def test_lines_say_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tell(shown(True))
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.splitlines() == [
        "hmp tune: measuring ops",
        "hmp tune: 7 of about 30: 2 of 4 units: 0.620 of float32's",
        "hmp tune: 31 of about 31",
    ]


@pytest.mark.parametrize("progress", [False, None])
def test_nothing_is_said_where_it_is_not_asked_for_and_to_what_is_no_terminal(
    progress: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(shown(progress))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_where_rich_is_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    bar = shown(None)
    assert isinstance(bar, Bar)
    tell(bar)
    assert "measuring ops" in sys.stderr.getvalue()
    assert isinstance(shown(False), Silent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(shown(None), Lines)
    assert isinstance(shown(True), Lines)


def test_names_in_brackets_are_text_to_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    bar = shown(True)
    bar.stage("[red]solving[/]")
    bar.step(1, 2, "softmax @ [0-9]")
    bar.close()
    assert "[red]solving[/]" in sys.stderr.getvalue() and "softmax @ [0-9]" in sys.stderr.getvalue()


def test_no_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as pythonw has it
    for progress in (True, None):
        assert isinstance(shown(progress), Silent)


def test_an_object_with_the_methods_is_told() -> None:
    mine = Lines()
    assert shown(mine) is mine


def test_anything_else_is_an_error() -> None:
    with pytest.raises(hmp.HmpError) as caught:
        shown("bar")  # type: ignore[arg-type]
    assert str(caught.value) == "progress='bar' is none; give True, False, None or an object with the methods stage, step and close"


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
