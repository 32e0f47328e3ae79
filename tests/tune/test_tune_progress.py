"""What a search says: how far it is, as a bar on a terminal with rich and lines elsewhere, and what it found."""

from __future__ import annotations

import importlib.util
import io
import sys

import pytest

import hmp
import tune_result_kit
from hmp.tune.progress import Lines, Progress, Silent, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell(progress: Progress) -> None:
    progress.stage("measuring [red]ops[/]")  # brackets are text to the bar
    progress.step(7, 30, "2 of 4 units: 0.620 of float32's")
    progress.step(31, 30, "")
    progress.close()


def test_lines_say_how_far_it_is_where_it_is_asked_for_or_stderr_is_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell(shown(True))
    printed = capsys.readouterr()
    assert not printed.out
    assert "measuring" in printed.err and "7 of about 30: 2 of 4 units" in printed.err and "31 of about 31" in printed.err
    for progress in (False, None):
        tell(shown(progress))
        assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_where_rich_is_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    bar = shown(None)
    tell(bar)
    assert "measuring [red]ops[/]" in sys.stderr.getvalue()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(shown(None), Lines) and not isinstance(bar, Lines)
    monkeypatch.setattr(sys, "stderr", None)  # as pythonw has it
    assert all(isinstance(shown(progress), Silent) for progress in (True, None))


def test_an_object_with_the_methods_is_told_and_anything_else_is_an_error() -> None:
    mine = Lines()
    assert shown(mine) is mine
    with pytest.raises(hmp.HmpError, match="progress='bar'"):
        shown("bar")  # type: ignore[arg-type]


def test_the_table_has_the_choice_the_trials_the_units_and_how_it_ended() -> None:
    text = str(tune_result_kit.result())
    for each in ("linear", "matmul", "0.62", "habana", "autocast", "loss +4.00%, 1.00% allowed", "One note.", "seed 0"):
        assert each in text, each
    assert "no bound" in str(tune_result_kit.bare())
    assert "the budget is spent" in str(tune_result_kit.result(stopped="budget"))
    assert "the same call goes on from here" in str(tune_result_kit.result(stopped="interrupted"))
    slow = tune_result_kit.trial("slow", ("linear",), ratio=1.25)
    assert "no gain" in str(tune_result_kit.result(best=slow))
    assert "0.71 of float32's bytes" in str(tune_result_kit.result(objective="memory", predicted=-(2.0**21), left=2.0**20))
