"""The fp32_result list in policies: scopes, presets, tools, training in float16, weights that are cast once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hmp
from compile_kit import BRIDGED
from hmp.cli import main

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Block(nn.Module):
    """A router, an expert and an output layer, whose dtypes it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.lm_head = nn.Linear(16, 4, bias=False), nn.Linear(16, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"gate": self.gate(x), "up": self.up(x), "lm_head": self.lm_head(torch.relu(self.up(x)))}


ROUTER = hmp.Policy("router", bf16={"linear"}, fp32_result={"linear @ gate", "linear @ lm_head"})
X = torch.linspace(-2, 2, 48).view(3, 16)


def of_rounded(x: torch.Tensor, weight: torch.Tensor, low: torch.dtype = BF16) -> torch.Tensor:
    return x.to(low).float() @ weight.detach().to(low).float().T


def dtypes(results: dict[str, torch.Tensor]) -> dict[str, torch.dtype]:
    return {name: each.dtype for name, each in results.items()}


def test_entries_with_a_scope_keep_the_results_of_their_modules() -> None:
    model = hmp.apply(Block(), ROUTER)
    results = model(X)
    assert dtypes(results) == {"gate": F32, "up": BF16, "lm_head": F32}
    assert torch.equal(results["gate"], of_rounded(X, model.gate.weight))
    assert torch.equal(results["lm_head"], of_rounded(torch.relu(results["up"]), model.lm_head.weight))


@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
def test_so_they_do_in_compiled_code() -> None:
    model = hmp.apply(Block(), ROUTER)
    wanted = model(X)
    results = torch.compile(model, backend="eager", fullgraph=True)(X)
    assert dtypes(results) == dtypes(wanted) and all(torch.equal(results[name], wanted[name]) for name in wanted)
    for of in (results, wanted):
        model.zero_grad()
        sum(each.float().square().sum() for each in of.values()).backward()
        of["gradients"] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.equal(results["gradients"], wanted["gradients"])


def test_over_a_preset_the_file_takes_its_ops(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("autocast\n")
    (tmp_path / "fp32_result.txt").write_text("linear @ lm_head\nbmm\n")
    policy = hmp.Policy.load(tmp_path)
    assert policy.fp32_result == {"bmm"} and "linear" in policy.bf16 and "bmm" not in policy.bf16
    assert dtypes(hmp.apply(Block(), policy)(X)) == {"gate": BF16, "up": BF16, "lm_head": F32}
    assert hmp.Policy.load(policy.save(tmp_path / "saved")) == policy
    with hmp.casts(policy.unscoped):
        assert torch.bmm(X[None], X.T[None]).dtype is F32


def test_no_tool_takes_the_float32_result_for_a_violation() -> None:
    model = hmp.apply(Block(), ROUTER)
    with hmp.record() as report:
        model(X)
    assert report.verify().violations() == []
    rows = {row.module: row for row in report.rows if row.op == "linear"}
    assert {name: (row.rule, row.source, row.compute, row.output) for name, row in rows.items()} == {
        "gate": ("fp32_result", "linear @ gate", "bfloat16", "float32"),
        "up": ("bf16", "linear", "bfloat16", "bfloat16"),
        "lm_head": ("fp32_result", "linear @ lm_head", "bfloat16", "float32"),
    }
    report.assert_dtype("linear", BF16)
    hmp.verify(model, (X,))
    with hmp.detect_nonfinite():
        model(X)
    compared = hmp.compare(Block(), (X,), ROUTER)
    assert "gate" in str(compared)
    assert hmp.fallbacks() == {}


def test_what_is_not_finite_is_found() -> None:
    with hmp.casts(hmp.Policy(fp32_result={"linear"}, dtype=F16)), pytest.raises(hmp.NonFiniteError, match="linear"):
        with hmp.detect_nonfinite():
            torch.nn.functional.linear(torch.full((1, 4), 1e5), torch.ones(2, 4))  # float16 ends at 65504
    with hmp.casts(hmp.Policy(fp32_result={"linear"}, dtype=F16)), hmp.detect_nonfinite():
        y = torch.nn.functional.linear(torch.full((1, 4), 6e4), torch.ones(2, 4))
    assert torch.equal(y, torch.full((1, 2), 4 * float(torch.tensor(6e4).half())))  # beyond float16


def test_explain_and_check_say_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "its inputs are rounded to the low-precision dtype, and its result stays float32 (R23)"
    told = hmp.explain("matmul", hmp.Policy(fp32_result={"matmul"}))
    assert (told.cast, told.why.partition("; ")[0]) == ("fp32_result", said)
    assert "in some modules: linear @ gate, on the fp32_result list" in str(hmp.explain("linear", ROUTER))
    (tmp_path / "fp32_result.txt").write_text("linear @ *.gate\nsoftmax\naddmm_\nbmm\n")
    (tmp_path / "fp8.txt").write_text("bmm\n")
    assert main(["check", "--problems", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
    expected = (
        "the fp32_result list expected a matrix product (linear, matmul, linalg.matmul, rmatmul, mm, bmm, addmm, baddbmm, einsum), got "
    )
    assert lines[0] == f"error  fp32_result.txt:2: softmax: {expected}'softmax'; remove it"
    assert lines[1].startswith(f"error  fp32_result.txt:3: addmm_: {expected}'addmm_'")
    assert any("bmm: is also on the " in line for line in lines)
    for list_name in ("fp8", "fp32"):
        with pytest.raises(hmp.OpListError, match="'bmm' is on the fp32_result list and on the"):
            hmp.Policy(fp32_result={"bmm"}, **{list_name: {"bmm"}})


def test_a_scaler_passes_over_a_step_whose_rounded_gradient_overflows() -> None:
    model = hmp.apply(Block(), ROUTER.replace(dtype=F16))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**30), torch.optim.SGD(model.parameters(), lr=0.01)
    before = model.gate.weight.detach().clone()
    scaler.scale(model(X)["gate"].square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.gate.weight, before) and scaler.get_scale() == 2.0**29


def test_weights_that_are_cast_once_give_the_same_results() -> None:
    model = hmp.apply(Block(), ROUTER)
    with torch.no_grad():
        wanted = model(X)
        hmp.cast_weights(model, X)
        assert model.up.weight.dtype is BF16
        results = model(X)
    assert dtypes(results) == dtypes(wanted) and all(torch.equal(results[name], wanted[name]) for name in wanted)
