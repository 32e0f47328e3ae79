"""The parts of .ci/device: what each runs, in a process of its own and within its own time, and what it came to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import devices_here

ROOT = Path(__file__).resolve().parents[2]
# Devices whose kernels are the processor's: their products are slower.
ON_THE_PROCESSOR = ("cpu", "pretend", "xla")
_SLOWER = {"cpu": 3, "pretend": 6, "xla": 20}  # XLA compiles each shape of each op


@dataclass
class Outcome:
    """What a part came to: its checks, each with "name", "outcome", "said" and "seconds", and tables of figures as markdown."""

    part: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def counts(self, outcome: str) -> int:
        return sum(check["outcome"] == outcome for check in self.checks)

    @property
    def failed(self) -> bool:
        return self.counts("failed") > 0

    def add(self, name: str, outcome: str, said: str) -> None:
        self.checks.append({"name": name, "outcome": outcome, "said": said, "seconds": 0.0})


@dataclass(frozen=True)
class Part:
    """`run(options, seconds)` takes at most so many seconds, about; `seconds` is what it may take on a GPU."""

    about: str
    seconds: int
    run: Callable[[Any, float], Outcome]


def missing(*packages: str) -> list[str]:
    return [name for name in packages if find_spec(name) is None]


def environment(device: str, results: Path) -> dict[str, str]:
    """That of the processes: hmp and the helpers come from this checkout."""
    paths = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("device", "support"))]
    own = {"HMP_TEST_DEVICE": device, "HMP_DEVICE_RESULTS": str(results), "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    # Bits are compared: cuBLAS may else choose another algorithm for the same product, and hmp other kernels than torch on a processor
    kernels = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HMP_LOW_KERNELS": "native"}
    return {**os.environ, **kernels, **own, **devices_here.environment(device)}


def run(command: list[str], seconds: float, environment: dict[str, str]) -> int | None:
    """The exit code of the command, None where it was ended after so many seconds. What it had started ends with it, either way."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    _running.add(process)
    try:
        return process.wait(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)
        _running.discard(process)
        process.wait()


_running: set[subprocess.Popen[bytes]] = set()


def end_all() -> None:
    """Ends every process that run() waits for in another thread."""
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # of its group nobody is left
        os.killpg(process.pid, signal.SIGKILL)


def observed(part: str, command: list[str], options: Any, seconds: float) -> Outcome:
    """Runs a command that appends what it finds to HMP_DEVICE_RESULTS. That it was ended, or crashed, is a check that failed."""
    found = Outcome(part)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        code = run(command, seconds, environment(options.device, results))
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    for line in lines:
        try:
            found.checks.append(json.loads(line))
        except json.JSONDecodeError:  # its process was ended while it wrote
            break
    found.seconds = time.perf_counter() - start
    if code is None:
        found.add(part, "failed", f"ended after {seconds:.0f} seconds, with {len(found.checks)} checks done")
    elif code != 0 and not found.failed:
        found.add(part, "failed", f"exit code {code}, with {len(found.checks)} checks done")
    elif not found.checks:
        found.add(part, "failed", "nothing was run")
    return found


def checks(part: str) -> Callable[[Any, float], Outcome]:
    """Runs the checks of tests/device/on_<part>.py."""
    command = [sys.executable, str(ROOT / "tests" / "device" / "device_part.py"), part]
    return lambda options, seconds: observed(part, command, options, seconds)


def rule_tests(options: Any, seconds: float) -> Outcome:
    """Runs tests/rules with tensors on the device; of the smallest run, one file."""
    lacking = missing("pytest", "hypothesis", "numpy")
    if lacking:
        found = Outcome("rule-tests")
        found.add("tests/rules", "not run", f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing")
        return found
    files = ["tests/rules/test_r5_r6_writes.py"]
    if not options.smallest:  # what is about caches, FP8 and saved lists has parts of its own
        files = [str(file) for name in ("test_r[0-9]*.py", "test_devices.py") for file in sorted((ROOT / "tests" / "rules").glob(name))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "device_tensors", "--tb=short", *files]
    if missing("pytest_timeout"):
        command += ["-o", "addopts=-m 'not slow'"]  # without --strict-config: pyproject.toml sets a timeout, a key that nobody knows then
    if not missing("xdist") and not options.smallest:
        command += ["-n", str(min(12, os.cpu_count() or 1)), "--max-worker-restart", "50"]
    return observed("rule-tests", command, options, seconds)


# What the benchmarks measure here: each piece writes a table of its own, so that a slow one loses no other.
PIECES = {
    "memory": ["--only", "memory,caches", "--sizes", "small"],
    "fp8": ["--only", "fp8", "--rounds", "9"],
    "steps": ["--only", "training,inference", "--sizes", "medium", "--rounds", "7"],
    "accuracy": ["--only", "gradients", "--sizes", "small", "--rounds", "5"],
}
SMALLEST_PIECE = {"memory": ["--only", "memory,caches", "--smallest", "--models", "mlp,lstm"]}


def benchmarks(options: Any, seconds: float) -> Outcome:
    """Runs `python -m benchmarks` piece by piece, and takes over its tables."""
    found = Outcome("benchmarks")
    start = time.perf_counter()
    if missing("transformers"):
        found.add("the models of transformers", "not run", "transformers is missing")
    for name, arguments in (SMALLEST_PIECE if options.smallest else PIECES).items():
        left = seconds - (time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks", "--device", options.device, "--write", folder, *arguments]
            written = Path(folder) / "results.json"
            code = run(command, left, environment(options.device, Path(folder) / "unused")) if left > 1 else None
            results = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
        said = "; ".join(results.get("failures", []))
        if code is None:
            found.add(name, "failed", "not run: no time was left" if left <= 1 else f"ended after {left:.0f} seconds")
        elif code != 0 or not results:
            found.add(name, "failed", said or f"exit code {code}")
        else:
            found.add(name, "passed", f"`python -m benchmarks --device {options.device} {' '.join(arguments)}`")
        if results.get("rows"):
            found.tables.append(_table(results["rows"]))
    found.seconds = time.perf_counter() - start
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    verdicts = {True: "met", False: "missed", None: "-"}
    cells = [(r["what"], r["target"], r["result"], verdicts[r["met"]] + (", within noise" if r["within_noise"] else "")) for r in rows]
    lines = ["| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in cells]
    return "\n".join(["| what | target | result | verdict |", "|---|---|---|---|", *lines])


PARTS: dict[str, Part] = {
    "presets": Part("hmp.apply(model) beside torch.autocast of the device", 60, checks("presets")),
    "rules": Part("the cast rules beside explicit casts, with torch alone", 150, checks("rules")),
    "threads": Part("user Python in backward and checkpoints, on the thread of the device", 60, checks("threads")),
    "caches": Part("caches of casts, on one stream and on several", 60, checks("caches")),
    "graphs": Part("captured CUDA graphs", 60, checks("graphs")),
    "marks": Part("writes to the device's memory, and what torch's copy-on-write mark does there", 90, checks("marks")),
    "fp16": Part("float16 with GradScaler", 60, checks("fp16")),
    "fp8": Part("products in FP8: kernels beside the emulation, training", 150, checks("fp8")),
    "ddp": Part("DDP and FSDP2 with one process", 90, checks("ddp")),
    "tools": Part("recordings, findings of NaN, memory", 60, checks("tools")),
    "compile": Part("torch.compile", 120, checks("compile")),
    "rule-tests": Part("tests/rules with tensors on the device", 240, rule_tests),
    "benchmarks": Part("hmp beside torch.autocast and plain torch", 240, benchmarks),
}


def limit(part: str, options: Any, left: float) -> float:
    """The seconds that a part may take: its own, of what is left of the whole."""
    return min(PARTS[part].seconds * _SLOWER.get(options.device, 1), left)
