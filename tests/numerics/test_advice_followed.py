"""What detect_nonfinite() and compare() advise names ops that lists can hold, can be pasted, and helps when it is followed literally."""

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
    """Weights by which every gate is 8 x 100 x 300, beyond float16 in whatever order it is added up; in float32 none is Inf."""
    for parameter in module.parameters():
        parameter.fill_(100.0)
    return module


# Ops that autocast decides, and ops that hmp leaves to torch.
FOUND: dict[str, tuple[hmp.Policy, Callable[[], Any]]] = {
    "einsum": (TORCH_CPU, lambda: torch.einsum("ij,jk->ik", LARGE, LARGE)),
    "tensordot": (TORCH_CPU, lambda: torch.tensordot(LARGE, LARGE, 1)),
    "matrix_power": (TORCH_CPU, lambda: torch.matrix_power(LARGE, 2)),
    "lstm": (TORCH_CPU, lambda: of_ones(nn.LSTM(8, 8))(LARGE[None])),
    "gru": (TORCH_CPU, lambda: of_ones(nn.GRU(8, 8))(LARGE[None])),
    "sum": (HABANA, lambda: (HALF * 200).sum()),
    "outer": (HABANA, lambda: torch.outer(HALF, HALF)),
    "kron": (HABANA, lambda: torch.kron(HALF, HALF)),
    "exp": (HABANA, lambda: TWELVES.exp()),
    "cumsum": (HABANA, lambda: (HALF * 200).cumsum(0)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    # an LSTM that computes in float32 overflows nowhere: its result is within 1
    "op",
    [pytest.param(op, marks=pytest.mark.native_kernels) if op == "lstm" else op for op in FOUND],
)
def test_the_line_of_a_finding_can_be_pasted_and_mends_it(op: str) -> None:
    policy, call = FOUND[op]
    # oneDNN has an LSTM in float16 for some processors alone: on the others it runs in float32 (R11), and nothing overflows
    with torch.backends.mkldnn.flags(enabled=False):
        found = finding(policy, call)
        assert found.op == op and f"policy '{policy.name}'" in found.rule
        assert finding(pasted(found.remedy, policy=policy), call) is None


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


HUGE = torch.full((1, 2, 2), 300.0), torch.full((1, 2, 2), 3000.0)  # whose products float16 does not hold


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preset", ["torch-cuda", "habana", "autocast", "gaudi", "habana-o2"])
def test_a_presets_remedy_is_a_line_to_paste_that_mends_it(preset: str) -> None:
    before = hmp.Policy.load(preset).replace(dtype="float16")
    line = finding(before, lambda: torch.bmm(*HUGE)).remedy
    assert "op_lists" not in line
    policy = pasted(line)
    assert policy.dtype is before.dtype is torch.float16
    assert policy.fp32 == before.fp32 | {"bmm"}
    assert policy.bf16 == before.bf16 - {"bmm"}
    with hmp.casts(policy), hmp.detect_nonfinite():
        assert torch.equal(torch.bmm(*HUGE), torch.full((1, 2, 2), 1_800_000.0))
    assert line.endswith("  # bfloat16 in place of float16 has float32's range")


def test_names_that_stand_for_the_same_op_leave_the_list_together() -> None:
    before = hmp.Policy(dtype="float16", bf16={"mul", "multiply"})
    policy = pasted(finding(before, lambda: torch.mul(*HUGE)).remedy, policy=before)
    assert not policy.bf16 and finding(policy, lambda: torch.mul(*HUGE)) is None


def test_a_product_in_fp8_leaves_the_fp8_list_too() -> None:
    """A name on the FP8 list and on the FP32 list is an error: the line that is pasted takes it off the one and puts it on the other."""
    before = hmp.Policy(dtype="float16", bf16={"mm", "linear"}, fp8={"linear"})
    x = torch.full((16, 16), 300.0)
    found = finding(before, lambda: F.linear(x, x))
    assert "`linear`" in str(found) and found.rule.startswith("on the fp8 list of policy") and found.rule.endswith("low dtype float16")
    policy = pasted(found.remedy, policy=before)
    assert (policy.fp8, policy.bf16, policy.fp32) == (frozenset(), {"mm"}, before.fp32 | {"linear"})
    with hmp.casts(policy), hmp.detect_nonfinite():
        assert torch.equal(F.linear(x, x), torch.full((16, 16), 1_440_000.0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry", ["linear @ 0", "linear @ *", "* @ 0"])
def test_an_entry_for_some_modules_leaves_the_list_with_its_scope(entry: str) -> None:
    before = hmp.Policy(bf16={entry, "mm"}, dtype="float16")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    torch.nn.init.constant_(model[0].weight, 60_000.0)

    def result(policy: hmp.Policy) -> torch.Tensor:
        hmp.apply(model, policy)
        try:
            with hmp.detect_nonfinite():
                return model(torch.full((1, 2), 100.0))
        finally:
            hmp.remove(model)

    with pytest.raises(hmp.NonFiniteError) as caught:
        result(before)
    policy = pasted(caught.value.finding.remedy, policy=before)
    assert policy.entries("fp32") == ["linear @ *" if entry.endswith("*") else "linear @ 0"]
    assert policy.entries("bf16") == (["mm", entry] if entry.startswith("*") else ["mm"])
    assert result(policy).tolist() == [[12_000_000.0] * 2]


ASKED = {"half": lambda x: x.half(), "to": lambda x: x.to(torch.float16), "type": lambda x: x.type(torch.float16)}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("policy", ["habana", None])
def test_no_list_is_advised_for_what_asks_for_a_dtype(name: str, policy: str | None) -> None:
    x = torch.full((2,), 1e6)
    with hmp.casts(policy) if policy else hmp.disable_casts(), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        ASKED[name](x)
    told = f"`{name}` asks for that dtype itself, and no list reaches it: leave the tensor in float32 here, or take bfloat16"
    assert caught.value.finding.remedy == told
    assert torch.isfinite(x.bfloat16()).all()


def test_no_list_is_advised_for_an_in_place_form_of_what_is_no_op() -> None:
    with hmp.casts("habana"), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        torch.zeros(2, dtype=torch.float16).copy_(torch.full((2,), 1e6))
    assert caught.value.finding.remedy == "no list reaches an in-place form: write into a float32 tensor"
