"""How a search tells how far it is: a bar on a terminal with rich, lines elsewhere, nothing where nothing is asked for."""

from __future__ import annotations

import importlib.util
import io
import sys

import pytest

import hmp
from hmp.tune.progress import Bar, Lines, Progress, Silent, shown


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
