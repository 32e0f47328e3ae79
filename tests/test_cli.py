"""The command line: exit status 0 done, 1 the check failed, 2 wrong use."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hmp.cli import main

ROOT = Path(__file__).resolve().parent.parent


def test_help_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["demo", "--nonsense"], ["demo", "--epochs", "0"], ["demo", "--epochs", "x"]], ids=" ".join
)
def test_wrong_use_is_two_and_says_what_there_is(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "usage: hmp" in printed.err


@pytest.mark.parametrize("package", ["rich", "sklearn", "numpy"])
def test_demo_without_its_extra_names_the_command_to_install_it(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert error == f"hmp demo needs {package}, not installed here: pip install 'hmp-torch[demo]'\n"


def test_importing_the_command_line_needs_no_extra() -> None:
    code = "import sys; sys.modules.update(rich=None, sklearn=None, numpy=None); import hmp.cli; print(hmp.cli.main([]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_python_m_hmp_exits_with_the_status_of_main() -> None:
    done = subprocess.run([sys.executable, "-m", "hmp", "nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: hmp" in done.stderr
