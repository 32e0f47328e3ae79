"""Cells in a loop: their weights are cast once and kept once for backward, and each use has a gradient of its own (R18, R21)."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hmp
from low_kernels_kit import products_as_computed
from oracle import kept_for_backward

STEPS, WIDTH = 8, 64
CELLS = {"gru": lambda: nn.GRUCell(WIDTH, WIDTH), "lstm": lambda: nn.LSTMCell(WIDTH, WIDTH), "tanh": lambda: nn.RNNCell(WIDTH, WIDTH)}
LISTED = hmp.Policy("listed", bf16={"lstm_cell", "gru_cell", "rnn_tanh_cell"})
MANY = 80  # steps, after which sums in bfloat16 are far from those in float32


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return CELLS[name](), torch.randn(STEPS, 4, WIDTH)


def run(cell: nn.Module, xs: torch.Tensor, cast: Any = lambda tensor: tensor) -> torch.Tensor:
    """The sum of the last step's state; `cast` is called on weights and states at every use."""
    state: Any = torch.zeros(xs.shape[1], WIDTH)
    state = (state, state) if isinstance(cell, nn.LSTMCell) else state
    for x in xs:
        used = {name: cast(weight) for name, weight in cell.named_parameters()}
        given = tuple(map(cast, state)) if isinstance(state, tuple) else cast(state)
        if cast(x) is x:
            state = cell(x, state)
            continue
        with products_as_computed():
            state = torch.func.functional_call(cell, used, (cast(x), given))
    return (state[0] if isinstance(state, tuple) else state).float().sum()


def gradients(cell: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True))


@pytest.mark.native_kernels
@pytest.mark.parametrize(("name", "whole"), [("gru", False), ("lstm", True)])
def test_r21_no_more_is_kept_than_by_autocast_and_gradients_are_those_of_a_cast_for_each_use(name, whole):
    cell, xs = made(name)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, _ = kept_for_backward(lambda: run(cell, xs))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = run(cell, xs)
    wanted = loss.detach(), gradients(cell, loss)
    with hmp.convert(policy="torch-cpu") if whole else hmp.casts("torch-cpu"):
        ours, loss = kept_for_backward(lambda: run(cell, xs))
        later = run(cell, xs)
    assert ours <= 1.01 * theirs
    for _ in range(2):  # the graph is retained
        torch.testing.assert_close((loss.detach(), gradients(cell, loss)), wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradients(cell, later), wanted[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", CELLS)
def test_r21_a_listed_cell_has_the_gradients_of_a_cast_for_each_use(name):
    cell, xs = made(name)
    loss = run(cell, xs, lambda tensor: tensor.bfloat16())
    wanted = loss.detach(), gradients(cell, loss)
    copies: dict[int, torch.Tensor] = {}
    once, _ = kept_for_backward(
        lambda: run(cell, xs, lambda t: copies.setdefault(id(t), t.bfloat16()) if t.is_leaf and t.requires_grad else t.bfloat16())
    )
    with hmp.convert(policy=LISTED):
        ours, loss = kept_for_backward(lambda: run(cell, xs))
    torch.testing.assert_close((loss.detach(), gradients(cell, loss)), wanted, rtol=0, atol=0)
    assert ours <= 1.01 * once


AUTOCAST_FOR_EACH = {"device_type": "cpu", "dtype": torch.bfloat16, "cache_enabled": False}


@pytest.mark.parametrize(("make", "policy"), [(nn.GRU, "torch-cpu"), (nn.RNN, hmp.Policy("listed", bf16={"gru", "rnn_tanh"}))])
def test_r21_an_op_of_many_steps_sums_their_gradients_in_float32(make, policy):
    torch.manual_seed(0)
    net, x, toward = make(16, 24), torch.randn(MANY, 4, 16), torch.linspace(0, 1, MANY * 4 * 24).view(MANY, 4, 24)

    def gradients_of(net: nn.Module, x: torch.Tensor, region: Any) -> torch.Tensor:
        with region:
            result = net(x)[0]
        found = torch.autograd.grad((result.to(x.dtype) * toward.to(x.dtype)).mean(), list(net.parameters()))
        return torch.cat([each.double().flatten() for each in found])

    exact = gradients_of(copy.deepcopy(net).double(), x.double(), contextlib.nullcontext())
    regions = {"hmp": hmp.casts(policy), "once": torch.autocast("cpu", torch.bfloat16), "each": torch.autocast(**AUTOCAST_FOR_EACH)}
    errors = {name: float((gradients_of(net, x, region) - exact).norm() / exact.norm()) for name, region in regions.items()}
    assert errors["once"] > 2 * errors["each"]
    assert errors["hmp"] <= (1.1 if policy == "torch-cpu" else 2) * errors["each"]  # listed, the gates are bfloat16 too


@pytest.mark.native_kernels
@pytest.mark.parametrize(
    ("make", "watch"), [(nn.GRU, lambda: FlopCounterMode(display=False)), (nn.RNN, hmp.record)], ids=["flops", "record"]
)
def test_r21_a_step_that_is_watched_has_the_gradients_of_a_cast_for_each_use(make, watch):
    torch.manual_seed(0)
    net, x = make(16, 24), torch.randn(MANY, 4, 16)

    def gradients_of(*regions: Any) -> list[torch.Tensor]:
        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(region)
            loss = (net(x)[0].float() - 0.5).square().mean()  # every step pulls one way
            return list(torch.autograd.grad(loss, list(net.parameters())))

    wanted = gradients_of(torch.autocast(**AUTOCAST_FOR_EACH))
    for found, each in zip(gradients_of(hmp.casts("torch-cpu"), watch()), wanted, strict=True):
        assert (found - each).norm() <= 2**-10 * each.norm()
