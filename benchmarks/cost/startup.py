"""The time of `import hmp` after torch is imported, and of `convert()` in a fresh process, the first time and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from ..harness.results import Found, at_most
from ..harness.stats import estimate

IMPORT_TARGET, CONVERT_TARGET = 25, 150
ROOT = Path(__file__).resolve().parents[2]
_CHILD = """
import json, time
now = time.perf_counter
start = now(); import torch; torch_ms = now() - start
start = now(); import hmp; hmp.convert; import_ms = now() - start
start = now(); hmp.convert(); first_ms = now() - start
start = now(); hmp.revert(); revert_ms = now() - start
again = []
for _ in range(5):
    start = now(); hmp.convert(); again.append(now() - start); hmp.revert()
print(json.dumps([1000 * t for t in (torch_ms, import_ms, first_ms, revert_ms, sorted(again)[2])]))
"""
_NAMES = ("import torch", "import hmp", "first convert()", "revert()", "convert() again")


def run(rounds: int) -> Found:
    """Return the rows about starting, from `rounds` fresh processes."""
    found = Found("startup")
    samples: dict[str, list[float]] = {name: [] for name in _NAMES}
    # as an installed package has it, the bytecode is there: the first process, which is not counted, writes it
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for number in range(rounds + 1):
        child = [sys.executable, "-c", _CHILD]
        done = subprocess.run(child, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        if not number:
            continue
        for name, value in zip(_NAMES, json.loads(done.stdout), strict=True):
            samples[name].append(value)
    found.samples = samples
    found.details = [f"ms, medians of {rounds} fresh processes, policy habana"]
    found.details += [f"{name:16} {median(each):8.1f}   least {min(each):8.1f}" for name, each in samples.items()]
    for name, target, what in (
        ("import hmp", IMPORT_TARGET, "import hmp and its first name, torch imported before"),
        ("first convert()", CONVERT_TARGET, "convert(), the first in a process"),
        ("convert() again", CONVERT_TARGET, "convert(), after a revert()"),
    ):
        figure = estimate(samples[name])
        found.rows.append(at_most(what, target, figure, f"{figure.text(1)} ms", " ms"))
    return found
