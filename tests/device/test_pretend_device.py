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
@pytest.mark.parametrize("part", ["rules", "caches", "marks", "counts", "threads", "fp16", "fp8", "tools", "compile"])
def test_hmp_on_the_pretend_device(part: str, failures: dict[str, str]) -> None:
    """The checks of an accelerator: copies are kept in its memory and are never stale, and no weight is cast more often than need be."""
    outcome = device_parts.checks(part)(SimpleNamespace(device="pretend"), 550)
    assert not outcome.failed, outcome.checks
    assert outcome.counts("passed")


@pytest.mark.nightly
def test_the_tests_of_the_rules_on_the_pretend_device(failures: dict[str, str]) -> None:
    outcome = device_parts.rule_tests(SimpleNamespace(device="pretend", smallest=False), 1500)
    assert not outcome.failed, [check for check in outcome.checks if check["outcome"] == "failed"]
    assert outcome.counts("passed")


SCRIPT = """
import pretend_device
pretend_device.set_up()  # as a backend's module does, which a script imports after hmp has patched torch
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("pretend:1")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(4, 8, device="pretend:1")).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(model(torch.ones(1, 8, device="pretend:1")).dtype, model[0].weight.dtype, model[0].weight.device)
"""


@pytest.mark.slow
def test_hmp_run_casts_in_a_script_that_brings_the_device(tmp_path: Path, failures: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(pretend_checks.__file__).parent)}
    command = [sys.executable, "-m", "hmp", "run", "--policy", "habana", str(tmp_path / "script.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.stdout.splitlines()[-1:] == ["torch.bfloat16 torch.float32 pretend:1"], run.stdout + run.stderr
