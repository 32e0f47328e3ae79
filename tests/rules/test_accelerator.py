"""The rules on an accelerator that runs backward on a thread of its own: a device in Python, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import accelerator_checks
import hmp
import python_device


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """The checks that failed, run once for all tests of this file: a device cannot be unregistered."""
    path = os.pathsep.join([os.path.dirname(os.path.dirname(os.path.abspath(hmp.__file__))), os.path.dirname(python_device.__file__)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, accelerator_checks.__file__], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout)
    return found


@pytest.mark.slow  # its process imports Dynamo for the checkpoints
@pytest.mark.skipif(not python_device.AVAILABLE, reason="this torch cannot register a backend from Python")
@pytest.mark.parametrize("name", accelerator_checks.CHECKS)
def test_on_an_accelerator(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
