"""The command line: exit status 0 done, 1 the check failed, 2 wrong use."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import hmp
from hmp.cli import main

ROOT = Path(__file__).resolve().parent.parent


def test_help_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["demo", "--nonsense"],
        ["demo", "--epochs", "0"],
        ["demo", "--epochs", "x"],
        ["diff", "habana"],
        ["diff", "a", "b", "c"],
        ["lists", "a", "b"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_two_and_says_what_there_is(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "usage: hmp" in printed.err


def folder(path: Path, bf16: str, dtype: str = "bfloat16") -> str:
    path.mkdir()
    for name, text in (("bf16", bf16), ("fp32", "log"), ("promote", "cat"), ("dtype", dtype)):
        (path / f"{name}.txt").write_text(text + "\n")
    return str(path)


def test_diff_shows_what_is_on_another_list_and_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = folder(tmp_path / "one", "mm\nconv2d"), folder(tmp_path / "other", "mm\ncat", "float16")
    assert main(["diff", one, other]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{one} -> {other}: 3 differences",
        "  (low dtype)  bfloat16 -> float16",
        "  cat          promote  -> bf16",
        "  conv2d       bf16     -> unlisted",
    ]


def test_diff_of_one_policy_with_itself_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "torch-cpu", hmp.Policy.load("torch-cpu").name]) == 0
    assert capsys.readouterr().out.endswith("are the same\n")


def test_diff_of_two_releases_shows_what_changed_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "torch-cuda@2.7", "torch-cuda@2.13"]) == 1
    assert "  rms_norm              unlisted -> fp32\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["diff", "habana", "nope"], ["diff", "nope", "habana"], ["lists", "nope"]], ids=" ".join)
def test_a_policy_that_there_is_not_is_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"hmp {arguments[0]}: 'nope' is no policy; presets are apex-o1, autocast")


def test_lists_has_a_line_for_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["preset", "low", "dtype", "bf16", "fp32", "promote"]
    assert [line.split()[0] for line in lines] == hmp.policies()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["habana-o2"] == ["bfloat16", "13", "1", "0"]
    assert rows["apex-o1"] == ["float16", "26", "53", "19"]
    assert rows["torch-cpu"] == ["is", hmp.Policy.load("torch-cpu").name, "here"]


def test_lists_of_a_policy_are_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists", folder(tmp_path / "mine", "mm\nconv2d")]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["", "bf16:", "  conv2d", "  mm", "", "fp32:", "  log", "", "promote:", "  cat"]


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
