"""What detect_nonfinite() and compare() advise names ops that lists can hold, can be pasted, and helps when it is followed literally."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from trap_kit import pasted

LARGE = torch.full((8, 8), 300.0)
HUGE = torch.full((1, 2, 2), 300.0), torch.full((1, 2, 2), 3000.0)  # whose products float16 does not hold
HALF = LARGE[0].half()
POLICY = hmp.Policy("half", bf16={"einsum", "lstm", "mul"}, dtype="float16")


def finding(policy: hmp.Policy, call: Callable[[], Any]) -> Any:
    """What detect_nonfinite() finds, None for nothing."""
    try:
        with torch.no_grad(), hmp.casts(policy), hmp.detect_nonfinite():
            call()
    except hmp.NonFiniteError as error:
        return error.finding
    return None


def lstm() -> Any:
    """Every gate is 8 x 100 x 300, beyond float16 in whatever order it is added up; in float32 none is Inf."""
    module = nn.LSTM(8, 8)
    for parameter in module.parameters():
        parameter.fill_(100.0)
    return module(LARGE[None])


# Two that are listed, and two that are left to torch.
FOUND: dict[str, Callable[[], Any]] = {
    "einsum": lambda: torch.einsum("ij,jk->ik", LARGE, LARGE),
    "lstm": lstm,
    "sum": lambda: (HALF * 200).sum(),
    "kron": lambda: torch.kron(HALF, HALF),
}


# an LSTM that computes in float32 overflows nowhere: its result is within 1
@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.native_kernels) if op == "lstm" else op for op in FOUND])
def test_the_line_of_a_finding_can_be_pasted_and_mends_it(op: str) -> None:
    call = FOUND[op]
    # oneDNN has an LSTM in float16 for some processors alone: on the others it runs in float32 (R11), and nothing overflows
    with torch.backends.mkldnn.flags(enabled=False):
        found = finding(POLICY, call)
        assert found.op == op and "policy 'half'" in found.rule
        assert finding(pasted(found.remedy, policy=POLICY), call) is None


@pytest.mark.parametrize("preset", ["torch-cuda", pytest.param("habana-o2", marks=pytest.mark.slow)])
def test_a_presets_remedy_is_a_line_to_paste_that_mends_it(preset: str) -> None:
    before = hmp.Policy.load(preset).replace(dtype="float16")
    line = finding(before, lambda: torch.bmm(*HUGE)).remedy
    assert "op_lists" not in line
    policy = pasted(line)
    assert policy.dtype is before.dtype is torch.float16
    assert (policy.fp32, policy.bf16) == (before.fp32 | {"bmm"}, before.bf16 - {"bmm"})
    with hmp.casts(policy), hmp.detect_nonfinite():
        assert torch.equal(torch.bmm(*HUGE), torch.full((1, 2, 2), 1_800_000.0))


def test_a_product_in_fp8_leaves_the_fp8_list_too() -> None:
    """A name on the FP8 list and on the FP32 list is an error: the line that is pasted takes it off the one and puts it on the other."""
    before = hmp.Policy(dtype="float16", bf16={"mm", "linear"}, fp8={"linear"})
    x = torch.full((16, 16), 300.0)
    found = finding(before, lambda: F.linear(x, x))
    assert found.op == "linear" and "fp8 list" in found.rule
    policy = pasted(found.remedy, policy=before)
    assert (policy.fp8, policy.bf16, policy.fp32) == (frozenset(), {"mm"}, before.fp32 | {"linear"})
    with hmp.casts(policy), hmp.detect_nonfinite():
        assert torch.equal(F.linear(x, x), torch.full((16, 16), 1_440_000.0))


@pytest.mark.parametrize("entry", ["linear @ *", pytest.param("* @ 0", marks=pytest.mark.slow)])
def test_an_entry_for_some_modules_leaves_the_list_with_its_scope(entry: str) -> None:
    before = hmp.Policy(bf16={entry, "mm"}, dtype="float16")
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.constant_(model[0].weight, 60_000.0)

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


ROW = torch.full((8,), -3e38, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("policy", "call"),
    [
        ("torch-cpu", lambda: ROW + ROW),
        ("torch-cpu", lambda: torch.zeros(8, dtype=torch.bfloat16) / 0),
        ("habana", lambda: torch.sum(ROW)),
        (hmp.Policy(bf16={"exp"}, dtype="float16"), lambda: torch.exp(HALF)),  # exp(300)
        ("torch-cpu", lambda: torch.matmul(torch.full((2, 2), 1e30), torch.full((2, 2), 1e30))),
    ],
)
def test_no_move_is_advised_where_float32_overflows_too(policy: hmp.Policy | str, call: Callable[[], Any]) -> None:
    moved = hmp.Policy(fp32={"add", "div", "sum", "exp", "matmul"})
    for each in (policy, moved):
        with pytest.raises(hmp.NonFiniteError) as caught, hmp.casts(each), hmp.detect_nonfinite():
            call()
        assert "move(" not in caught.value.finding.remedy and "keep its inputs in range" in caught.value.finding.remedy


class Products(nn.Module):
    """A product that overflows float16 in its second block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Product(0.01), Product(1.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x).float() * 0 + x)


class Product(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.matmul(x * self.scale, x)
        self.computed = product.dtype
        return product


@pytest.mark.parametrize("inside", [False, True])
def test_a_move_is_offered_for_the_module_alone_and_mends_it(inside: bool) -> None:
    """The policy may be applied to an inner network, which scoped entries are relative to."""
    policy = hmp.Policy("half", bf16={"matmul"}, dtype="float16")
    net = hmp.apply(Products(), policy)
    outer = nn.ModuleDict({"net": net})
    outer.forward = lambda x: net(x)  # type: ignore[method-assign]
    with pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        (outer if inside else net)(LARGE)
    finding = caught.value.finding
    assert finding.module == ("net.blocks.1" if inside else "blocks.1")
    assert '.move("matmul @ blocks.1", "fp32")' in finding.remedy
    hmp.apply(net, policy.move("matmul @ blocks.1", "fp32"))
    with hmp.detect_nonfinite():
        assert torch.equal(net(LARGE), torch.full((8, 8), 8 * 300.0 * 300.0))
    assert [block.computed for block in net.blocks] == [torch.float16, torch.float32]
    hmp.apply(hmp.remove(net).blocks[1], policy)
    with pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
        net(LARGE)
    assert " @ " not in caught.value.finding.remedy  # which is relative to the block


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_torch_autocast_its_dtype_is_named_and_the_advice_mends_it(dtype: torch.dtype) -> None:
    a, b = (torch.full((2, 2), 300.0), torch.full((2, 2), 3000.0)) if dtype is torch.float16 else (torch.full((2, 2), 2e19),) * 2

    def call() -> torch.Tensor:
        return torch.mm(a, b)

    with pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite(), torch.autocast("cpu", dtype):
        call()
    finding = caught.value.finding
    assert finding.rule == f'no policy was active here, but torch.autocast("cpu") with {str(dtype)[6:]}'
    if dtype is torch.bfloat16:  # 8e38 is beyond float32, too
        assert "in float32 it makes Inf, too" in finding.remedy
        return
    policy = pasted(finding.remedy[finding.remedy.index("policy = ") :])
    with hmp.detect_nonfinite(), torch.autocast("cpu", dtype), hmp.casts(policy):
        assert torch.equal(call(), torch.full((2, 2), 1_800_000.0))
    with hmp.detect_nonfinite(), torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False):
        assert torch.equal(call(), torch.full((2, 2), 1_800_000.0))


# Forms that write into their first input (R5), and what asks for a dtype itself.
BEYOND_LISTS: list[tuple[hmp.Policy | None, Callable[[], Any]]] = [
    (POLICY, lambda: HALF.clone().__imul__(HALF)),
    (POLICY, lambda: torch.zeros(2, dtype=torch.float16).copy_(torch.full((2,), 1e6))),
    (POLICY, lambda: torch.full((2,), 1e6).half()),
    (None, lambda: torch.full((2,), 1e6).to(torch.float16)),
]


def test_where_no_list_helps_no_list_is_advised() -> None:
    for policy, call in BEYOND_LISTS:
        with hmp.casts(policy) if policy else hmp.disable_casts(), pytest.raises(hmp.NonFiniteError) as caught, hmp.detect_nonfinite():
            call()
        remedy = caught.value.finding.remedy
        assert "op lists don't" in remedy and ".txt" not in remedy and "policy =" not in remedy


def test_compare_names_the_op_that_was_called_and_moving_it_helps() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Linear(32, 32)), torch.randn(16, 32)
    policy = hmp.Policy(bf16={"linear"})

    def dropouts_share(chosen: hmp.Policy) -> float:
        torch.manual_seed(1)
        found = hmp.compare(model, batch, chosen, loss=lambda output: output.float().square().mean())
        assert {each.moves[0].entry for each in found.trials.alone} <= {"linear @ 0", "linear @ 2", "dropout @ 1"}
        return next(group.share for group in found.by_module() if group.name == "1")

    before = dropouts_share(policy)
    assert before > 0.1
    assert dropouts_share(policy.replace(fp32=policy.fp32 | {"dropout"})) < 0.6 * before


def test_compare_advises_only_what_a_list_can_hold() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).to(torch.float32).to(torch.bfloat16)
            y = y.expand(2, *y.shape).transpose(0, 1) * 1.37
            y *= 1.11
            return F.softmax(y, -1)

    policy = hmp.Policy(bf16={"linear"}, fp32={"softmax"})
    found = hmp.compare(Net(16, 16), torch.randn(8, 16), policy, loss=lambda output: output.float().square().sum())
    advised = {each.moves[0].entry.partition(" @ ")[0] for each in found.trials.alone}
    assert "linear" in advised
    for op in advised:
        hmp.explain(op)  # raises for what is no name of an op
        assert not op.endswith("_")
    assert advised.isdisjoint({"to", "_to_copy", "imul"})


def test_an_op_of_the_preset_under_a_folder_is_moved_by_a_line_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in (("base.txt", "torch-cuda"), ("dtype.txt", "float16"), ("fp32.txt", "gelu")):
        (folder / name).write_text(f"{text}\n")
    call = lambda: LARGE @ LARGE  # noqa: E731
    found = finding(hmp.Policy.load(folder), call)
    assert found.remedy.startswith(f"write `matmul` in {folder / 'fp32.txt'}")
    (folder / "fp32.txt").write_text("gelu, matmul\n")
    assert finding(hmp.Policy.load(folder), call) is None


def test_verify_says_that_attention_has_its_own_softmax(caplog: pytest.LogCaptureFixture) -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    policy = hmp.Policy.load("autocast").move("softmax", "fp32")
    hmp.verify(Attends(), torch.randn(1, 2, 4, 8), policy)
    assert "no call matched: softmax; the softmax of scaled_dot_product_attention" in caplog.text
    caplog.clear()
    hmp.verify(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), torch.randn(2, 8), policy)
    assert not caplog.text
    hmp.verify(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 8), policy)
    assert "no call matched: softmax" in caplog.text and "attention" not in caplog.text
