"""The benchmark runs; how fast anything is, no test says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_benchmarks_run_at_their_smallest_size() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--rounds", "1", "--calls", "2"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = run.stdout.splitlines()
    assert "autocast" in lines[1]
    assert len(lines) == 12
