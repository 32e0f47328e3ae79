"""P7, counted cost: what hmp adds to a call is counted, never timed.

Oracle: tables of bounds that a simple core keeps too, and torch.autocast with a cast for each use. Counted are Python calls
(`sys.setprofile`) and ATen ops (`torch.profiler`). A quick way that is lost shows here and in no result.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hmp

pytestmark = pytest.mark.native_kernels  # a product that computes in float32 (R11) has more to do
LISTS = hmp.Policy("lists", bf16={"linear", "matmul", "conv2d", "scaled_dot_product_attention"}, fp32={"softmax"})


def python_calls(function: Callable[[], Any], warm: int = 6) -> tuple[int, int]:
    """Python functions that a steady call enters, the given one apart, and in how many files of hmp's."""
    for _ in range(warm):
        function()
    calls, files = 0, set()

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            files.add(frame.f_code.co_filename)

    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls - 1, len({name for name in files if "hmp" in name and "tests" not in name})


X, W, B = torch.randn(8, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
LOW = X.detach().bfloat16()
# A steady call: (what is called, the most Python calls that it may make). An operator's method is bound in Python too.
CALLS: dict[str, tuple[Callable[[], Any], int]] = {
    "linear, all low": (lambda: F.linear(LOW, LOW), 2),
    "matmul, all low": (lambda: torch.matmul(LOW, LOW), 2),
    "@, all low": (lambda: LOW @ LOW, 3),
    "softmax, float32": (lambda: torch.softmax(X, -1), 2),
    "sdpa, all low": (lambda: F.scaled_dot_product_attention(LOW[None], LOW[None], LOW[None]), 4),
    "tanh, unlisted": (lambda: torch.tanh(X), 1),
    "add, a mixture of torch's own": (lambda: torch.add(X, LOW), 2),
    "linear, to cast": (lambda: F.linear(X, W, B), 18),
    "matmul, to cast": (lambda: torch.matmul(X, X), 6),
    "softmax, to cast": (lambda: torch.softmax(LOW, -1), 6),
}


@pytest.mark.parametrize("name", CALLS)
def test_p7_a_steady_call_makes_few_python_calls(name: str) -> None:
    call, most = CALLS[name]
    plain = python_calls(call)[0]
    with hmp.convert(policy=LISTS):
        calls, files = python_calls(call)
        with hmp.disable_casts():
            off = python_calls(call)[0]
    if torch.__version__ < (2, 10) and name == "linear, to cast":
        most = 24  # more is asked in Python of that torch
    assert calls - plain <= most, f"{calls - plain} Python calls in {files} files"
    assert off - plain <= 2, f"{off - plain} Python calls where casts are off"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(self.norm(x)) for each in self.qkv)
        return self.out(torch.softmax(q @ k.mT, -1) @ v)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), (4, 16)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 8)), (2, 2, 6, 6)),
    "attention": (Attention, (2, 4, 16)),
    "one weight twice": (lambda: nn.Sequential(*[nn.Linear(16, 16)] * 2), (4, 16)),
}


def aten_ops(step: Callable[[], Any]) -> collections.Counter[str]:
    for _ in range(4):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return collections.Counter(event.name for event in found.events() if event.name.startswith("aten::"))


@pytest.mark.parametrize("net", NETS)
def test_p7_a_training_step_runs_no_more_ops_than_under_autocast(net: str) -> None:
    """The ops that compute, make or copy: a shared cast may save some, and none is new."""
    make, shape = NETS[net]
    model, x = make(), torch.randn(shape)

    def step() -> None:
        model.zero_grad()
        with around():
            loss = model(x).float().sum()
        loss.backward()

    around: Callable[[], Any] = contextlib.nullcontext
    with hmp.convert(policy="torch-cpu"):
        ours = aten_ops(step)
    hmp.revert()
    around = functools.partial(torch.autocast, "cpu", cache_enabled=False)
    theirs = aten_ops(step)
    for name in ("aten::_to_copy", "aten::copy_", "aten::zeros", "aten::clone", "aten::addmm", "aten::mm", "aten::bmm", "aten::linear"):
        assert ours[name] <= theirs[name], f"{name}: {ours[name]} under hmp, {theirs[name]} under torch.autocast"


def test_p7_nothing_is_computed_where_casts_are_off() -> None:
    model, x = nn.Linear(16, 16), torch.randn(4, 16)

    def step() -> None:
        model(x).sum().backward()

    plain = aten_ops(step)
    with hmp.convert(policy=LISTS), hmp.disable_casts():
        assert aten_ops(step) == plain
    with hmp.convert(policy=hmp.Policy("nothing listed")):
        assert aten_ops(step) == plain
