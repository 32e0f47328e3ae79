"""On XLA the cast rules hold, copies of weights are never stale, and hmp.apply(model) gives the bits of torch.autocast.

XLA computes on the machine's own processor, so that its tensors need no accelerator; `.ci/versions xla` brings it. In processes of their
own: XLA has to be there before the first backward.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

import device_parts

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed: .ci/versions xla")


PARTS = ["rules", "threads", "caches", "marks", "counts", "fp16", "fp8", "presets", "lists", "tools", "compile"]


@pytest.mark.timeout(1260)  # XLA compiles each new program
@pytest.mark.parametrize("part", PARTS)
def test_hmp_on_xla(part: str) -> None:
    outcome = device_parts.checks(part)(SimpleNamespace(device="xla"), 1200)
    assert not outcome.failed, outcome.checks
    assert outcome.counts("passed")


@pytest.mark.timeout(2460)
def test_the_tests_of_the_rules_on_xla() -> None:
    outcome = device_parts.rule_tests(SimpleNamespace(device="xla", smallest=False), 2400)
    assert not outcome.failed, [check for check in outcome.checks if check["outcome"] == "failed"]
    assert outcome.counts("passed")
