"""Which tests run which line of hmp, how long each takes, and which are asked about a mutant: kept in .build/mutation."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from coverage import CoverageData

from .mutants import package_of

MOST = 120  # tests for one mutant
# File of tests that are run without coverage, whose tracing ends where a test sets another trace function → the package that is its own.
UNTRACED = {"tests/rules/test_r18_copies.py": "hmp"}


class _Durations:
    """A plugin that notes how long each test took with its fixtures, and which ones passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bad: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.bad.add(report.nodeid)


def measure(root: Path, into: Path, folders: Sequence[str], workers: int) -> None:
    """Run the tests of those folders under coverage; write `into`, for each file of hmp: line to tests, and each test's seconds."""
    into.parent.mkdir(parents=True, exist_ok=True)
    data, durations = into.with_suffix(".coverage"), _Durations()
    os.environ["COVERAGE_FILE"] = str(data)
    traced = ["-n", str(workers), "--cov=hmp", "--cov-report=", "--cov-context=test", *(f"--ignore={root / file}" for file in UNTRACED)]
    untraced = [str(root / file) for file in UNTRACED if file.split("/")[1] in folders]
    for options in ([*traced, *(str(root / "tests" / folder) for folder in folders)], ["-n", "0", *untraced]):
        if options[-1].startswith(str(root)):
            pytest.main(["-q", "-p", "no:cacheprovider", *options], plugins=[durations])
    names = sorted(durations.seconds.keys() - durations.bad)
    numbers = {test: number for number, test in enumerate(names)}
    lines: dict[str, dict[str, list[int]]] = defaultdict(dict)
    measured = CoverageData(str(data))
    measured.read()
    for file in sorted(measured.measured_files()):
        for line, contexts in measured.contexts_by_lineno(file).items():
            tests = {numbers[test] for name in contexts if (test := name.rpartition("|")[0]) in numbers}
            lines[str(Path(file).relative_to(root))][str(line)] = sorted(tests)
    kept = {"tests": names, "seconds": [round(durations.seconds[test], 3) for test in names], "folders": list(folders), "lines": lines}
    into.write_text(json.dumps(kept, separators=(",", ":")))


class Choice:
    """The tests that ran the changed line; for one that runs at import those that ran any of its file."""

    def __init__(self, root: Path, covering: Path) -> None:
        kept = json.loads(covering.read_text())
        self.root, self.lines, self.names, self.folders = root, kept["lines"], kept["tests"], kept["folders"]
        self.seconds = dict(zip(self.names, kept["seconds"], strict=True))

    def tests(self, mutation: Any, budget: float) -> list[str]:
        """The quickest of each file first, until they take so many seconds."""
        file, package = str(mutation.module_path), package_of(str(mutation.module_path))
        covering = self._running(mutation) or {self.names[test] for tests in self.lines.get(file, {}).values() for test in tests}
        if not covering:
            covering = {test for test in self.names if test.startswith(("tests/properties/", "tests/unit/"))}
        spent: dict[str, float] = defaultdict(float)
        ranked: list[tuple[float, str]] = []
        for test in sorted(covering, key=lambda test: (self.seconds[test], test)):
            name = test.partition("::")[0]
            spent[name] += self.seconds[test]  # so that the first few are unlike one another
            ranked.append((spent[name], test))
        chosen: list[str] = []
        for _, test in sorted(ranked):
            budget -= self.seconds[test]
            if chosen and (budget < 0 or len(chosen) == MOST):
                break
            chosen.append(test)
        return chosen + [test for test in self.names if UNTRACED.get(test.partition("::")[0]) == package]

    def is_run(self, mutation: Any) -> bool:
        """Whether one of the measured tests runs the changed lines."""
        return bool(self._running(mutation))

    def _running(self, mutation: Any) -> set[str]:
        of_file = self.lines.get(str(mutation.module_path), {})
        span = range(mutation.start_pos[0], mutation.end_pos[0] + 1)
        return {self.names[test] for line in span for test in of_file.get(str(line), ())}
