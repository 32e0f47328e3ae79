"""The peak of a training step's memory, by torch's profiler, which does not ask hmp."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hmp


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)]
    return nn.Sequential(*itertools.chain(*blocks))


def step(model: nn.Module, policy: str, rows: int) -> None:
    with hmp.casts(policy):
        loss = model(torch.randn(rows, 256)).float().square().mean()
    loss.backward()
    model.zero_grad()


def by_the_profiler(policy: str) -> int:
    model = model_of(256)
    step(model, policy, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step(model, policy, 8192)
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


@pytest.mark.slow
def test_r22_the_peak_of_a_step_is_smaller() -> None:
    """Six blocks: each keeps 8,192 rows of 256 numbers in float32 and bfloat16 and two of 1,024 in bfloat16, 44 MiB."""
    plain, packed = by_the_profiler("autocast"), by_the_profiler("saved8")
    assert plain > 6 * 44 * 2**20
    assert packed < 0.9 * plain, (plain, packed)
