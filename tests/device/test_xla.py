"""Copies of weights that lie on XLA are never stale, no weight is cast more often than under torch.autocast, and the lists are XLA's own.

XLA computes on the machine's own processor, so that its tensors need no accelerator; `.ci/versions xla` brings it. In processes of their
own: XLA has to be there before the first backward.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

import device_parts

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed: .ci/versions xla")


@pytest.mark.parametrize("part", ["caches", "marks", "counts", "fp8", "threads", "tools", "lists"])
def test_hmp_on_xla(part: str) -> None:
    outcome = device_parts.checks(part)(SimpleNamespace(device="xla"), 550)
    assert not outcome.failed, outcome.checks
    assert outcome.counts("passed")
