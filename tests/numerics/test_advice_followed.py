"""What detect_nonfinite() and compare() advise names ops that lists can hold, and helps when it is followed literally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from trap_kit import pasted

LARGE = torch.full((8, 8), 300.0)
HALF = LARGE[0].half()
TWELVES = torch.full((8,), 12.0).half()
TORCH_CPU = hmp.Policy.load("torch-cpu").replace(dtype="float16")
HABANA = hmp.Policy.load("habana").replace(dtype="float16")


def finding(policy: hmp.Policy, call: Callable[[], Any]) -> Any:
    """What detect_nonfinite() finds, None for nothing."""
    torch.manual_seed(0)
    try:
        with torch.no_grad(), hmp.convert(policy=policy), hmp.detect_nonfinite():
            call()
    except hmp.NonFiniteError as error:
        return error.finding
    return None


def of_ones(module: nn.Module) -> nn.Module:
    """Weights by which every gate is 8 x 100 x 300, beyond float16 in whatever order it is added up."""
    for parameter in module.parameters():
        parameter.fill_(100.0)
    return module


AUTOCASTS = {
    "einsum": lambda: torch.einsum("ij,jk->ik", LARGE, LARGE),
    "tensordot": lambda: torch.tensordot(LARGE, LARGE, 1),
    "matrix_power": lambda: torch.matrix_power(LARGE, 2),
    "lstm": lambda: of_ones(nn.LSTM(8, 8))(LARGE[None]),
    "gru": lambda: of_ones(nn.GRU(8, 8))(LARGE[None]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", AUTOCASTS)
def test_the_line_for_an_op_that_autocast_decides_can_be_pasted(op: str) -> None:
    # oneDNN has an LSTM in float16 for some processors alone: on the others it runs in float32 (R11), and nothing overflows
    with torch.backends.mkldnn.flags(enabled=False):
        found = finding(TORCH_CPU, AUTOCASTS[op])
        assert found.op == op
        assert finding(pasted(found.remedy, policy=TORCH_CPU), AUTOCASTS[op]) is None


UNWRAPPED = {
    "sum": lambda: (HALF * 200).sum(),
    "outer": lambda: torch.outer(HALF, HALF),
    "kron": lambda: torch.kron(HALF, HALF),
    "exp": lambda: TWELVES.exp(),
    "cumsum": lambda: (HALF * 200).cumsum(0),
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", UNWRAPPED)
def test_an_op_that_hmp_leaves_to_torch_has_its_name_and_the_policy(op: str) -> None:
    found = finding(HABANA, UNWRAPPED[op])
    assert found.op == op
    assert "policy 'habana'" in found.rule
    assert finding(pasted(found.remedy, policy=HABANA), UNWRAPPED[op]) is None


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [TORCH_CPU, HABANA], ids=["torch-cpu", "habana"])
@pytest.mark.parametrize("call", [lambda: HALF.clone().mul_(HALF), lambda: HALF.clone().__imul__(HALF)], ids=["mul_", "*="])
def test_for_an_in_place_form_no_list_is_advised(policy: hmp.Policy, call: Callable[[], Any]) -> None:
    found = finding(policy, call)
    assert found.rule == "written in place: its first input keeps its dtype, whatever the lists say (R5)"
    assert found.remedy == (
        "no list reaches an in-place form: write it out of place, with `mul` on the FP32 list, or into a float32 tensor"
    )
    out_of_place = policy.replace(bf16=policy.bf16 - {"mul"}, fp32=policy.fp32 | {"mul"})
    assert finding(out_of_place, lambda: HALF * HALF) is None


def test_compare_names_the_op_that_was_called_and_moving_it_helps() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64)), torch.randn(32, 64)
    policy = hmp.Policy.load("torch-cpu")

    def dropouts_share(chosen: hmp.Policy) -> float:
        torch.manual_seed(1)
        found = hmp.compare(model, batch, chosen, loss=lambda output: output.float().square().mean())
        assert {op for op, _ in found.advice} <= {"linear", "dropout"}
        return next(group.share for group in found.by_module() if group.name == "1")

    before = dropouts_share(policy)
    assert before > 0.1
    assert dropouts_share(policy.replace(fp32=policy.fp32 | {"dropout"})) < 0.6 * before


def test_compare_advises_only_what_a_list_can_hold() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).to(torch.float32).to(torch.bfloat16)
            y = y.expand(2, *y.shape).transpose(0, 1)
            y = y * 1.37
            y *= 1.11
            return F.softmax(y, -1)

    found = hmp.compare(Net(), torch.randn(8, 16), "torch-cpu", loss=lambda output: output.float().square().sum())
    advised = {op for op, _ in found.advice}
    assert "linear" in advised
    for op in advised:
        hmp.explain(op)  # raises for what is no name of an op
        assert not op.endswith("_")
    assert advised.isdisjoint({"to", "_to_copy", "imul"})
