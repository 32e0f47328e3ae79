"""Copies of weights that lie on XLA are never stale, and no weight is cast more often than under torch.autocast.

XLA computes on the machine's own processor, so that its tensors need no accelerator; `.ci/versions xla` brings it. In processes of their
own: XLA has to be there before the first backward.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed: .ci/versions xla")


@pytest.mark.parametrize("part", ["caches", "marks", "counts"])
def test_hmp_on_xla(part: str) -> None:
    script = Path(__file__).with_name("device_part.py")
    paths = os.pathsep.join(map(str, (script.parents[2], script.parent)))
    # without the flag XLA leaves out casts to bfloat16 and back, and no result has the bits of a cast that is written out
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
    environment = {**os.environ, "PYTHONPATH": paths, "HMP_TEST_DEVICE": "xla", "PJRT_DEVICE": "CPU", "XLA_FLAGS": flags}
    run = subprocess.run([sys.executable, str(script), part], capture_output=True, text=True, timeout=550, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "  passed  " in run.stdout
