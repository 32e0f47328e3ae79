"""`.ci/device` runs here with `--device cpu`; what fails, crashes or is out of time is told and is the script's exit code."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
import types
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch

import device_kit
import device_parts
import device_report
from device_parts import Outcome, Part

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "device"
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")


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
    # what is not run says why
    assert "CUDA's own: kernels are captured as graphs there alone" in page
    assert "only on an accelerator: the CPU's backward runs on the calling thread" in page
    assert "Failed:" not in page
    assert "| bytes saved for backward, hmp / torch.autocast: none above |" in page


@pytest.mark.slow
def test_parts_run_alone_and_say_what_is_for_cuda_only(tmp_path: Path) -> None:
    code, printed, page = on_cpu(tmp_path, "--only", "threads,graphs")
    assert code == 0, printed
    assert "| threads | user Python in backward and checkpoints, on the thread of the device | 0 | 0 | 1 |" in page
    assert f"| torch | {torch.__version__} |" in page
    assert "Written by `.ci/device --device cpu --only threads,graphs`." in page
    assert "- 9 checks, `a_replayed_forward_has_the_weights_of_now` among them: CUDA's own: kernels are captured as graphs" in page


@NO_CUDA
def test_without_cuda_the_script_refuses(script: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--device", "cuda"]):
        with pytest.raises(SystemExit) as raised:
            script.main(arguments)
        assert raised.value.code == 2
        assert "sees no CUDA device here; --device cpu tries the script without one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "package", "said"),
    [
        ("hpu", "habana_frameworks", "there is no habana_frameworks here, Gaudi's bridge to torch: pip install habana-torch-plugin"),
        ("xla", "torch_xla", "there is no torch_xla here: pip install torch==2.9.0 torch_xla==2.9.0"),
    ],
)
def test_without_what_brings_the_device_the_script_says_what_is_missing(
    script: types.ModuleType, capsys: pytest.CaptureFixture[str], device: str, package: str, said: str
) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is here")
    with pytest.raises(SystemExit) as raised:
        script.main(["--device", device])
    assert raised.value.code == 2
    assert f"--device {device}: {said}" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_part_is_refused(script: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--device", "cpu", "--only", "rules,speed"])
    assert "--only: unknown: speed; choose from presets,rules" in "".join(capsys.readouterr().err.split("\n")).replace(", ", ",")


def test_a_torch_that_is_too_old_is_refused(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.1+cpu")
    with pytest.raises(SystemExit):
        script.main(["--device", "cpu"])
    assert "torch 2.6.1+cpu is older than 2.7, which hmp needs" in capsys.readouterr().err


def _outcome(part: str, outcome: str, said: str) -> Part:
    def run(options: Any, seconds: float) -> Outcome:
        found = Outcome(part)
        found.add("a_check", outcome, said)
        return found

    return Part(f"what {part} is", 60, run)


@pytest.mark.parametrize(("outcome", "code"), [("passed", 0), ("not run", 0), ("failed", 1)])
def test_a_part_that_failed_is_the_exit_code(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str, code: int
) -> None:
    for name, part in (("one", _outcome("one", outcome, "why")), ("two", _outcome("two", "passed", "what was seen"))):
        monkeypatch.setitem(device_parts.PARTS, name, part)
    assert script.main(["--device", "cpu", "--only", "one,two", "--write", str(tmp_path)]) == code
    (page,) = tmp_path.iterdir()
    text = page.read_text(encoding="utf-8")
    heading = {"passed": "Seen:", "not run": "Not run:", "failed": "Failed:"}[outcome]
    assert f"## one\n\n{heading}\n" in text and "why" in text
    assert "## two\n\nSeen:\n\n- `a_check`: what was seen" in text  # the others went on


def test_a_part_for_which_no_time_is_left_failed(script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(device_parts.PARTS, "one", _outcome("one", "passed", "it ran"))
    assert script.main(["--device", "cpu", "--only", "one", "--minutes", "0.01", "--write", str(tmp_path)]) == 1
    (page,) = tmp_path.iterdir()
    assert "not run: the 0.01 minutes of the whole were over" in page.read_text(encoding="utf-8")


def _observed(code: str, seconds: float) -> Outcome:
    return device_parts.observed("part", [sys.executable, "-c", code], argparse.Namespace(device="cpu"), seconds)


WRITES = "import json, os; open(os.environ['HMP_DEVICE_RESULTS'], 'a').write(json.dumps(%r) + '\\n');"
PASSED = {"name": "a_check", "outcome": "passed", "said": "", "seconds": 0.1}


@pytest.mark.slow
def test_what_was_done_before_the_time_was_over_is_kept() -> None:
    found = _observed(WRITES % PASSED + "import time; time.sleep(600)", 5)
    assert found.checks[0] == PASSED
    assert (found.checks[1]["outcome"], found.checks[1]["said"]) == ("failed", "ended after 5 seconds, with 1 checks done")
    assert found.seconds < 300


# It leaves its process id in the file that the first argument names, under that name only once it is written.
STARTED = (
    "import os, sys, time; open(sys.argv[1] + '~', 'w').write(str(os.getpid())); os.rename(sys.argv[1] + '~', sys.argv[1]); time.sleep(600)"
)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit(1)", "os.abort()"])
def test_what_a_part_started_ends_with_it(tmp_path: Path, end: str) -> None:
    pid = tmp_path / "pid"
    waits = f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)"
    part = f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {STARTED!r}, {str(pid)!r}])\n{waits}\n{end}"
    seconds = 2.0
    while not pid.exists():  # where the machine is busy it gets more
        assert _observed(part, seconds).failed
        seconds *= 4
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


def test_a_crash_is_a_failure() -> None:
    found = _observed(WRITES % PASSED + "import os; os.abort()", 60)
    assert found.checks[1]["said"] == "exit code -6, with 1 checks done"
    assert found.failed
    assert _observed("pass", 60).checks[0]["said"] == "nothing was run"


def test_checks_pass_fail_and_are_not_run() -> None:
    def fails() -> None:
        raise AssertionError("the number is wrong")

    def cannot() -> None:
        raise device_kit.NotRun("no compiler")

    found = [device_kit.result(each.__name__, each) for each in (lambda: "seen", fails, cannot)]
    assert [(each.outcome, each.said.splitlines()[-1]) for each in found] == [
        ("passed", "seen"),
        ("failed", "AssertionError: the number is wrong"),
        ("not run", "no compiler"),
    ]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(device_kit, "checks_of", lambda part: lacks("hypothesis"))
    (found,) = device_kit.results("threads")
    assert (found.outcome, found.said) == ("not run", "hypothesis is missing")
    monkeypatch.setattr(device_kit, "checks_of", lambda part: lacks("hmp.cache"))  # a mistake, not a package
    with pytest.raises(ModuleNotFoundError):
        list(device_kit.results("caches"))
    monkeypatch.setattr(device_parts, "find_spec", lambda name: None)
    found = device_parts.rule_tests(argparse.Namespace(device="cpu", smallest=True), 60)
    assert found.checks[0]["said"] == "pytest, hypothesis, numpy are missing" and not found.failed


def test_comparisons_can_fail() -> None:
    x = torch.tensor([1.0, float("nan")])
    device_kit.same(x, x.clone(), "equal")
    for other in (torch.tensor([1.0, 2.0]), torch.tensor([1.5, float("nan")]), x.bfloat16(), x[None]):
        with pytest.raises(AssertionError, match="what"):
            device_kit.same(x, other, "what")


def test_every_check_belongs_to_a_part() -> None:
    files = {path.stem.removeprefix("on_") for path in Path(__file__).parent.glob("on_*.py")}
    assert files == set(device_kit.PARTS)
    assert set(device_parts.PARTS) - files == {"rule-tests", "benchmarks"}


def test_the_page_is_named_after_the_device() -> None:
    assert device_report.file_name("NVIDIA H200") == "nvidia-h200.md"
    assert device_report.device_name("cpu").startswith("CPU: ")


TESTS = """
import pytest, torch
def test_where(): assert torch.ones(2).device.type == "meta"
def test_wrong(): assert torch.ones(2).device.type == "cpu"
def test_trap_catches_the_naive_caster(): raise AssertionError
@pytest.mark.xfail
def test_expected(): raise AssertionError
"""


@pytest.mark.slow
def test_the_plugin_makes_tensors_on_the_device_and_notes_what_each_test_came_to(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    results = tmp_path / "results"
    environment = {**os.environ, **device_parts.environment("cpu", results), "HMP_TEST_DEVICE": "meta"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "device_tensors", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    found = {line["name"].partition("::")[2]: line for line in map(json.loads, results.read_text().splitlines())}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "test_where": "passed",
        "test_wrong": "failed",
        "test_trap_catches_the_naive_caster": "not run",
        "test_expected": "not run",
    }
    assert "assert 'meta' == 'cpu'" in found["test_wrong"]["said"]
    assert found["test_trap_catches_the_naive_caster"]["said"].startswith("only on the CPU: it shows a mistake")


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
