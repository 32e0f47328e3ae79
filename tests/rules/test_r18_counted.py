"""R18 counted: no more casts than torch.autocast makes, and no more memory at a step's peak."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import hmp
from copies_kit import LOW, Heads, Steps, casts_of

pytestmark = pytest.mark.native_kernels  # a product that computes in float32 (R11) makes more casts


USED_AGAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gru cell": (lambda: Steps(nn.GRUCell(16, 16)), (2, 16)),
    "lstm cell": (lambda: Steps(nn.LSTMCell(16, 16)), (2, 16)),
    "shared": (lambda: nn.Sequential(*[nn.Linear(16, 16)] * 5), (2, 16)),
    "shared convolution": (lambda: nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1)] * 5), (1, 4, 6, 6)),
    "heads": (Heads, (512, 512)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", USED_AGAIN)
def test_r18_no_more_casts_are_made_than_by_autocast(name: str, grad: bool) -> None:
    make, shape = USED_AGAIN[name]
    model, x = make(), torch.randn(shape)

    def call(region: Any) -> None:
        with torch.set_grad_enabled(grad), region:
            model(x)

    most = casts_of(lambda: call(torch.autocast("cpu", LOW)))
    assert casts_of(lambda: call(hmp.casts("torch-cpu"))) <= most
    with hmp.convert(policy="torch-cpu"):
        assert casts_of(lambda: call(contextlib.nullcontext())) <= most


def test_r18_an_activation_is_cast_once_in_a_call_and_at_each_use_outside() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.mv(x, vector), torch.mv(x, vector)

    model, x, vector = Twice(), torch.randn(512, 512, requires_grad=True), torch.randn(512, dtype=LOW, requires_grad=True)
    with hmp.convert(policy=hmp.Policy("low", bf16={"mv"})):
        assert casts_of(lambda: model(x)) == 1
        assert casts_of(lambda: model.forward(x)) == 2


def test_r18_a_scoped_policy_shares_copies_in_the_call_of_the_whole_model() -> None:
    layer = nn.Linear(16, 16)
    model, x = nn.Sequential(layer, nn.Sequential(nn.Tanh()), layer, nn.GELU(), layer), torch.randn(2, 16)  # both of one class
    with hmp.convert(model=model, policy=hmp.Policy("scoped", bf16={"linear", "tanh @ 1"})), torch.no_grad():
        assert casts_of(lambda: model(x)) == 3  # of the weight, the bias and the input


@pytest.mark.parametrize("reentrant", [False, True])
def test_r18_a_checkpoint_that_is_recomputed_outside_of_the_region_casts_weights_once(reentrant: bool) -> None:
    layer, x, policy = nn.Linear(16, 16), torch.randn(4, 16), hmp.Policy("low", bf16={"linear"})

    def twice(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, layer.weight, layer.bias).float().tanh(), layer.weight, layer.bias)

    def step(region: Any) -> None:
        with region:
            loss = checkpoint(twice, x.clone().requires_grad_(), use_reentrant=reentrant).float().square().mean()
        loss.backward()

    # and two of gradients, of the second use of weight and bias, which are summed in float32 (R21)
    most = casts_of(lambda: step(torch.autocast("cpu", LOW))) + 2
    assert casts_of(lambda: step(hmp.casts(policy))) <= most


def peak(step: Callable[[], Any]) -> int:
    """By torch's profiler, which does not ask hmp."""
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


WIDE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gru cell": (lambda: Steps(nn.GRUCell(32, 32)), (1024, 32)),
    "shared": (lambda: nn.Sequential(*[nn.Linear(64, 64)] * 5), (2048, 64)),
    "used once": (lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), (64, 256)),
    "heads": (Heads, (512, 512)),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", WIDE)
def test_r18_the_peak_of_a_step_is_autocasts(name: str, trains: bool) -> None:
    make, shape = WIDE[name]
    model, x = make(), torch.randn(shape)

    def step(region: Callable[[], Any]) -> None:
        with torch.set_grad_enabled(trains):
            with region():
                loss = model(x).float().square().mean()
            if trains:
                loss.backward()
                model.zero_grad()

    assert peak(lambda: step(lambda: hmp.casts("torch-cpu"))) <= 1.02 * peak(lambda: step(lambda: torch.autocast("cpu", LOW)))


class Chain(nn.Linear):
    """One weight, used as often as `uses` says."""

    uses = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = super().forward(x)
        return x


@pytest.mark.parametrize("grad", [False, True])
def test_r18_a_weight_that_earlier_calls_used_once_is_cast_once_where_a_call_uses_it_often(grad: bool) -> None:
    model, x = hmp.apply(Chain(64, 64, bias=False), "torch-cpu"), torch.randn(2, 64, dtype=LOW)  # of no activation a copy is asked for
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            model(x)
        model.uses = 4
        assert casts_of(lambda: model(x)) == 1
