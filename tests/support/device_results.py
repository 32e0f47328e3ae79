"""A plugin of pytest for .ci/device: what each test came to is appended to the file HMP_DEVICE_RESULTS as it ends: `-p device_results`."""

from __future__ import annotations

import json
import os
import sys

import pytest


class Results:
    code = 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return  # of a setup or a teardown that went well there is nothing to say
        said = report.capstdout if "tests/device/" in report.nodeid else ""  # what is worth a reader's while
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            said = str(reason).removeprefix("Skipped: ")
        elif report.failed:
            said = str(report.longrepr)
        line = {"name": report.nodeid, "outcome": "not run" if report.skipped else report.outcome, "said": said}
        with open(os.environ["HMP_DEVICE_RESULTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.code = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End without the end of Python: torch's thread for backward on the device lets go of the last graph after backward() has returned,
        and takes the GIL for that. Python ends a thread that asks when it has ended itself: "terminate called without an exception".
        """
        sys.stdout.flush()
        os._exit(self.code)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of several processes, the one that is told of all tests
        config.pluginmanager.register(Results())
