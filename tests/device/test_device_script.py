"""`.ci/device` runs here with `--device cpu`; what fails, crashes or is out of time is told and is the script's exit code."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
import types
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch

import device_kit
import device_parts
from device_parts import Outcome, Part

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "device"


def on_cpu(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """The exit code, what is printed, and the page."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--write", str(folder), *arguments], capture_output=True, text=True, cwd=folder
    )
    (page,) = folder.glob("cpu-*.md")
    return run.returncode, run.stdout + run.stderr, page.read_text(encoding="utf-8")


@pytest.fixture
def script() -> types.ModuleType:
    loader = SourceFileLoader("ci_device", str(SCRIPT))
    spec = spec_from_loader("ci_device", loader)
    assert spec is not None
    module = module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    path = list(sys.path)
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode, sys.path[:] = written, path
    return module


@pytest.mark.nightly
def test_every_part_runs_on_the_cpu(tmp_path: Path) -> None:
    code, printed, page = on_cpu(tmp_path, "--smallest")
    assert code == 0, printed
    for part in device_parts.PARTS:
        assert f"\n== {part}: " in printed
        assert f"\n## {part}\n" in page
    assert "CUDA's own: " in page and "Failed:" not in page  # what is not run says why
    assert "| bytes saved for backward, hmp / torch.autocast: none above |" in page


@pytest.mark.slow
def test_parts_run_alone_and_say_what_is_for_cuda_only(tmp_path: Path) -> None:
    code, printed, page = on_cpu(tmp_path, "--only", "threads,graphs")
    assert code == 0, printed
    assert "| threads | user Python in backward and checkpoints, on the thread of the device | 0 | 0 | 1 |" in page
    assert f"| torch | {torch.__version__} |" in page and "Written by `.ci/device --device cpu --only threads,graphs`." in page


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


def _outcome(part: str, outcome: str, said: str) -> Part:
    def run(options: Any, seconds: float) -> Outcome:
        found = Outcome(part)
        found.add("a_check", outcome, said)
        return found

    return Part(f"what {part} is", 60, run)


@pytest.mark.parametrize(("outcome", "code", "heading"), [("passed", 0, "Seen:"), ("not run", 0, "Not run:"), ("failed", 1, "Failed:")])
def test_a_part_that_failed_or_had_no_time_is_the_exit_code(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str, code: int, heading: str
) -> None:
    for name, part in (("one", _outcome("one", outcome, "why")), ("two", _outcome("two", "passed", "what was seen"))):
        monkeypatch.setitem(device_parts.PARTS, name, part)
    assert script.main(["--device", "cpu", "--only", "one,two", "--write", str(tmp_path)]) == code
    (page,) = tmp_path.iterdir()
    text = page.read_text(encoding="utf-8")
    assert f"## one\n\n{heading}\n" in text and "why" in text
    assert "## two\n\nSeen:\n\n- `a_check`: what was seen" in text  # the others went on
    assert script.main(["--device", "cpu", "--only", "two", "--minutes", "0.01", "--write", str(tmp_path)]) == 1
    assert "not run: " in page.read_text(encoding="utf-8")


def _observed(code: str, seconds: float) -> Outcome:
    return device_parts.observed("part", [sys.executable, "-c", code], argparse.Namespace(device="cpu"), seconds)


WRITES = "import json, os; open(os.environ['HMP_DEVICE_RESULTS'], 'a').write(json.dumps(%r) + '\\n');"
PASSED = {"name": "a_check", "outcome": "passed", "said": "", "seconds": 0.1}
# It leaves its process id in the file that the first argument names, under that name only once it is written.
STARTED = (
    "import os, sys, time; open(sys.argv[1] + '~', 'w').write(str(os.getpid())); os.rename(sys.argv[1] + '~', sys.argv[1]); time.sleep(600)"
)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["time.sleep(600)", "os.abort()"])
def test_what_was_done_before_a_part_was_ended_is_kept_and_what_it_started_ends_with_it(tmp_path: Path, end: str) -> None:
    pid = tmp_path / "pid"
    waits = f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)"
    part = f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {STARTED!r}, {str(pid)!r}])\n{waits}\n{end}"
    seconds = 2.0
    while not pid.exists():  # where the machine is busy it gets more
        found = _observed(WRITES % PASSED + "\n" + part, seconds)
        seconds *= 4
    assert found.checks[0] == PASSED and found.failed and "with 1 checks done" in found.checks[1]["said"]
    for _ in range(600):  # a killed process has its last moments too
        if not _lives(pid.read_text()):
            return
        time.sleep(0.1)
    raise AssertionError("what the part had started still runs")


def _lives(pid: str) -> bool:
    try:
        state = (Path("/proc") / pid / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_checks_pass_fail_and_are_not_run_and_nothing_that_ran_is_a_failure() -> None:
    def fails() -> None:
        device_kit.same(torch.ones(2), torch.ones(2).bfloat16(), "the dtype")

    def cannot() -> None:
        raise device_kit.NotRun("no compiler")

    found = [device_kit.result(each.__name__, each) for each in (lambda: "seen", fails, cannot)]
    assert [each.outcome for each in found] == ["passed", "failed", "not run"]
    assert (found[0].said, found[2].said) == ("seen", "no compiler") and "the dtype" in found[1].said
    assert _observed("pass", 60).failed


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(device_kit, "checks_of", lambda part: lacks("hypothesis"))
    (found,) = device_kit.results("threads")
    assert found.outcome == "not run" and "hypothesis" in found.said
    monkeypatch.setattr(device_kit, "checks_of", lambda part: lacks("hmp.cache"))  # a mistake, not a package
    with pytest.raises(ModuleNotFoundError):
        list(device_kit.results("caches"))
    monkeypatch.setattr(device_parts, "find_spec", lambda name: None)
    found = device_parts.rule_tests(argparse.Namespace(device="cpu", smallest=True), 60)
    assert "pytest" in found.checks[0]["said"] and not found.failed


def test_every_check_belongs_to_a_part() -> None:
    files = {path.stem.removeprefix("on_") for path in Path(__file__).parent.glob("on_*.py")}
    assert files == set(device_kit.PARTS)
    assert set(device_parts.PARTS) - files == {"rule-tests", "benchmarks"}


TESTS = """
import pytest, torch
def test_where(): assert torch.ones(2).device.type == "meta"
def test_wrong(): assert torch.ones(2).device.type == "cpu"
@pytest.mark.xfail
def test_expected(): raise AssertionError
"""


@pytest.mark.slow
def test_the_plugin_makes_tensors_on_the_device_and_notes_what_each_test_came_to(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_p3_caches.py").write_text("def test_skipped(): raise AssertionError\n")
    results = tmp_path / "results"
    environment = {**os.environ, **device_parts.environment("cpu", results), "HMP_TEST_DEVICE": "meta"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "device_tensors", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    found = {line["name"].partition("::")[2]: line for line in map(json.loads, results.read_text().splitlines())}
    wanted = {"test_where": "passed", "test_wrong": "failed", "test_skipped": "not run", "test_expected": "not run"}
    assert {name: line["outcome"] for name, line in found.items()} == wanted
    assert "assert 'meta' == 'cpu'" in found["test_wrong"]["said"] and found["test_skipped"]["said"].startswith("only on the CPU")


@pytest.mark.slow
def test_a_process_group_that_is_never_left_ends_its_process() -> None:
    """torch 2.7 waits with Python's lock, as PyDLL does: no thread of Python's can end that."""
    code = """
        import ctypes, device_kit
        device_kit.dist.destroy_process_group = lambda: ctypes.PyDLL(None).sleep(100)
        with device_kit.one_process(leaving=1.0):
            pass
    """
    environment = device_parts.environment("cpu", Path(os.devnull))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, timeout=90)
    assert done.returncode == 1 and "in one_process" in done.stderr
