"""`.ci/device` runs here with `--device cpu`; what fails, crashes or is out of time is told and is the script's exit code."""

from __future__ import annotations

import sys
import types
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import parser
from command_kit import ROOT, python

SCRIPT = ROOT / ".ci" / "device"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader = SourceFileLoader("ci_device", str(SCRIPT))
    module = module_from_spec(spec_from_loader("ci_device", loader))
    monkeypatch.setitem(sys.modules, "ci_device", module)
    loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_every_part_runs_on_the_cpu(tmp_path: Path, script: types.ModuleType) -> None:
    run = python(SCRIPT, "--device", "cpu", "--write", tmp_path, "--smallest", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    (page,) = (file.read_text(encoding="utf-8") for file in tmp_path.glob("cpu-*.md"))
    for part in script.PARTS:
        assert f"\n== {part}: " in run.stdout
        assert f"\n## {part}\n" in page
    assert "CUDA's own: " in page and "Failed:" not in page  # what is not run says why
    assert "| bytes saved for backward, hmp / torch.autocast: none above |" in page


def test_what_cannot_run_is_refused_with_what_is_missing(
    script: types.ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit) as raised:
            script.main(list(arguments))
        assert raised.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    assert torch.cuda.is_available() or "--device cpu" in refusal()
    for device, package in (("hpu", "habana_frameworks"), ("xla", "torch_xla")):
        assert find_spec(package) or package in refusal("--device", device)
    assert "speed" in refusal("--device", "cpu", "--only", "rules,speed")
    monkeypatch.setattr(torch, "__version__", "2.6.1+cpu")
    assert "2.6.1" in refusal("--device", "cpu")


@pytest.mark.parametrize(("outcome", "code", "heading"), [("passed", 0, "Seen:"), ("not run", 0, "Not run:"), ("failed", 1, "Failed:")])
def test_a_part_that_failed_or_had_no_time_is_the_exit_code(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str, code: int, heading: str
) -> None:
    ends = {"caches": (outcome, "why"), "graphs": ("passed", "what was seen")}
    monkeypatch.setattr(script, "_test", lambda found, *_: found.add("a_check", *ends[found.part]))
    assert script.main(["--device", "cpu", "--only", "caches,graphs", "--write", str(tmp_path)]) == code
    (page,) = tmp_path.iterdir()
    text = page.read_text(encoding="utf-8")
    assert f"## caches\n\n{heading}\n" in text and "why" in text
    assert "## graphs\n\nSeen:\n\n- `a_check`: what was seen" in text  # the others went on
    assert script.main(["--device", "cpu", "--only", "graphs", "--minutes", "0.01", "--write", str(tmp_path)]) == 1
    assert "not run: " in page.read_text(encoding="utf-8")


def test_every_file_is_a_part(script: types.ModuleType) -> None:
    files = {path.stem.removeprefix("on_") for path in Path(__file__).parent.glob("on_*.py")}
    assert files == set(script.PARTS) - {"rule-tests", "benchmarks"}


TESTS = """
import os, time, pytest, torch
def test_where():
    assert torch.ones(2).device.type == "meta"
    print("what was seen")
def test_wrong(): assert torch.ones(2).device.type == "cpu"
@pytest.mark.xfail
def test_expected(): raise AssertionError
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "time.sleep(600)", "os.abort()"])
def test_what_each_test_came_to_is_kept_whatever_ends_its_process(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    (tmp_path / "tests" / "device").mkdir(parents=True)
    (tmp_path / "tests" / "device" / "test_some.py").write_text(f"{TESTS}def test_last(): {end}\n")
    (tmp_path / "test_p3_copies.py").write_text("def test_skipped(): raise AssertionError\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    found = script.Outcome("part")
    script._test(found, ["-p", "device_tensors", "."], "meta", 40.0)
    came_to = {check["name"].partition("::")[2]: check for check in found.checks}
    wanted = {"test_where": "passed", "test_wrong": "failed", "test_skipped": "not run", "test_expected": "not run"}
    assert {name: came_to[name]["outcome"] for name in wanted} == wanted
    assert "assert 'meta' == 'cpu'" in came_to["test_wrong"]["said"] and came_to["test_where"]["said"] == "what was seen\n"
    assert came_to["test_skipped"]["said"].startswith("only on the CPU")
    if end != "pass":
        assert "with 4 checks done" in found.checks[-1]["said"]


def test_what_it_measures_are_parts_of_the_benchmark(script: types.ModuleType) -> None:
    for arguments in (*script.PIECES.values(), *script.SMALLEST_PIECE.values()):
        parser().parse_args(arguments)  # ends the process where there is no such part
