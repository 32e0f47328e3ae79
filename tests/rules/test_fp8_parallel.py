"""Two processes on gloo: DDP and FSDP2 give one process's gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import hmp
from fp8_oracle import RECIPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
]


def test_two_ranks_have_one_processs_gradients(tmp_path: Path) -> None:
    script = Path(__file__).parent / "fp8_ranks" / "ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)]
    path = str(Path(hmp.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank.{rank}").read_text())
        assert set(found) == {f"{recipe}, {mode}" for recipe in RECIPES for mode in ("ddp", "fsdp2")}
        # the sum of two float32 gradients, in another order
        assert all(away < 1e-5 for away in found.values()), found
