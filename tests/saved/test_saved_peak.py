"""The peak of a training step's memory, by the system and by torch's profiler: neither asks hmp, or knows of it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hmp

# Most that a step needs at a time, beyond what the process had before it.
CHILD = """
import sys, torch, hmp
from test_saved_peak import model_of, step
def memory(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
torch.set_num_threads(1)
model = model_of(256)
step(model, sys.argv[1], 16)
before = memory("VmRSS:")
step(model, sys.argv[1], 8192)
print(memory("VmHWM:") - before)
"""


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)]
    return nn.Sequential(*itertools.chain(*blocks))


def step(model: nn.Module, policy: str, rows: int) -> None:
    with hmp.casts(policy):
        loss = model(torch.randn(rows, 256)).float().square().mean()
    loss.backward()
    model.zero_grad()


def by_the_system(policy: str) -> int:
    command = [sys.executable, "-c", CHILD, policy]
    return int(subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout)


def by_the_profiler(policy: str) -> int:
    model = model_of(256)
    step(model, policy, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step(model, policy, 8192)
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "peak", [pytest.param(by_the_system, marks=pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")), by_the_profiler]
)
def test_r22_the_peak_of_a_step_is_smaller(peak) -> None:
    """Six blocks: each keeps 8,192 rows of 256 numbers in float32 and bfloat16 and two of 1,024 in bfloat16, 44 MiB."""
    plain, packed = peak("autocast"), peak("saved8")
    assert plain > 6 * 44 * 2**20
    assert packed < 0.9 * plain, (plain, packed)
