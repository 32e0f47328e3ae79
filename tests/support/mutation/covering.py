"""Which tests run which line of hmp, and how long each takes: measured a few test folders at a time, kept in .build/mutation."""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from coverage import CoverageData

# File of tests that are run without coverage, whose tracing ends where a test sets another trace function → the package that is its own.
UNTRACED = {"tests/rules/test_r18_threads.py": "caches"}


class Durations:
    """A plugin that notes how long each test took with its fixtures, and which ones passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bad: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One part of a test: what it needs, itself, or what follows it."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.bad.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As a plugin, this module keeps of the tests of a run every nth, $HMP_EVERY, always the same ones."""
    nth = int(os.environ.get("HMP_EVERY", "1"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % nth == 0]


def measure(root: Path, into: Path, folders: Sequence[str], workers: int, every: int = 1) -> None:
    """Run the tests of those folders under coverage; write `into`, for each file of hmp: line to tests, and each test's seconds."""
    into.parent.mkdir(parents=True, exist_ok=True)
    data, durations = into.with_suffix(".coverage"), Durations()
    os.environ |= {"COVERAGE_FILE": str(data), "HMP_EVERY": str(every)}
    asked = ["-q", "-n", str(workers), "--cov=hmp", "--cov-report=", "--cov-context=test", "-p", "no:cacheprovider"]
    asked += ["-p", __name__]
    folders_asked = [str(root / "tests" / folder) for folder in folders]
    pytest.main([*asked, *(f"--ignore={root / file}" for file in UNTRACED), *folders_asked], plugins=[durations])
    untraced = [str(root / file) for file in UNTRACED if file.split("/")[1] in folders]
    if untraced:
        pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *untraced], plugins=[durations])
    kept = json.loads(into.read_text()) if into.exists() else {"tests": [], "seconds": [], "failed": [], "folders": {}, "lines": {}}
    passed = sorted(durations.passed - durations.bad - set(kept["tests"]))
    kept["tests"] += passed
    kept["seconds"] += [round(durations.seconds[test], 3) for test in passed]
    kept["failed"] = sorted({*kept["failed"], *durations.bad})
    kept["folders"] |= dict.fromkeys(folders, every)
    numbers = {test: number for number, test in enumerate(kept["tests"])}
    measured = CoverageData(str(data))
    measured.read()
    for file in sorted(measured.measured_files()):
        lines = kept["lines"].setdefault(str(Path(file).relative_to(root)), {})
        for line, contexts in measured.contexts_by_lineno(file).items():
            tests = {numbers[test] for name in contexts if (test := name.rpartition("|")[0]) in numbers}
            lines[str(line)] = sorted(tests.union(lines.get(str(line), ())))
    into.write_text(json.dumps(kept, separators=(",", ":")))
