"""The pretend device of the tests is a device as torch knows them: it trains as the CPU does, and a write clears a mark on its memory.

In a process of its own: the device stays for the life of a process, where it is torch.accelerator's, and comes before the first backward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import device_parts
import pretend_checks


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """The checks that failed, run once for all tests of this file; the first run on a machine compiles the device, for a minute."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pretend_checks.__file__).parent), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, pretend_checks.__file__], capture_output=True, text=True, timeout=550, env=environment)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    if found["unavailable"]:
        pytest.skip(found["unavailable"])
    failed: dict[str, str] = found["failed"]
    return failed


@pytest.mark.slow
def test_the_pretend_device_is_a_device(failures: dict[str, str]) -> None:
    assert not failures, "\n".join(failures.values())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["caches", "marks", "counts", "rules"])
def test_hmp_on_the_pretend_device(part: str, failures: dict[str, str]) -> None:
    """The checks of an accelerator: copies are kept in its memory and are never stale, and no weight is cast more often than need be."""
    outcome = device_parts.checks(part)(SimpleNamespace(device="pretend"), 550)
    assert not outcome.failed, outcome.checks
    assert outcome.counts("passed")
