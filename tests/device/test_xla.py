"""On XLA the cast rules hold, copies of weights are never stale, and hmp.apply(model) gives the bits of torch.autocast.

XLA computes on the machine's own processor, so that its tensors need no accelerator; `.ci/versions xla` brings it. In processes of their
own: XLA has to be there before the first backward.
"""

from __future__ import annotations

import importlib.util

import pytest

import devices_here

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed: .ci/versions xla")


@pytest.mark.timeout(1260)  # XLA compiles each new program
@pytest.mark.parametrize("part", "rules caches fp16 fp8 fp32_result presets tools compile".split())
def test_hmp_on_xla(part: str) -> None:
    devices_here.run_tests("xla", f"tests/device/on_{part}.py", seconds=1200)


@pytest.mark.timeout(2460)
def test_the_tests_of_the_rules_on_xla() -> None:
    devices_here.run_tests("xla", "-p", "device_tensors", *devices_here.rule_tests(), seconds=2400)
