"""What hmp does on an accelerator's own memory and backward thread, asked of the pretend device of the tests.

In processes of their own: the device stays for the life of a process, where it is torch.accelerator's, and comes before the first backward.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import devices_here
from command_kit import RUN, python

SUPPORT = devices_here.ROOT / "tests" / "support"


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    """Skips where the device cannot be made; asked in a process that may import what compiles it."""
    said = python("-c", "import pretend_device; print(pretend_device.unavailable())", cwd=SUPPORT).stdout.strip()
    if said:
        pytest.skip(said)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rules", "caches", "fp16", "fp8", "fp32_result", "presets", "tools", "compile"])
def test_hmp_on_the_pretend_device(part: str) -> None:
    """The first run on a machine compiles the device, for a minute."""
    devices_here.run_tests("pretend", f"tests/device/on_{part}.py")


@pytest.mark.nightly
def test_the_tests_of_the_rules_on_the_pretend_device() -> None:
    devices_here.run_tests("pretend", "-p", "device_tensors", *devices_here.rule_tests(), seconds=1500)


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
def test_hmp_run_casts_in_a_script_that_brings_the_device(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = python(*RUN, "--policy", "habana", "script.py", cwd=tmp_path, before=SUPPORT)
    assert run.stdout.splitlines()[-1:] == ["torch.bfloat16 torch.float32 pretend:1"], run.stdout + run.stderr
