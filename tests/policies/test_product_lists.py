"""The FP8 and the fp32_result list: what may stand on them, where they are read from, what they win over, and what tools say of them.

In compiled, exported and traced code too, with the results and the gradients of eager code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hmp
from compile_kit import BRIDGED
from fp8_oracle import PRODUCTS, RECIPES
from hmp.cli import main
from trap_kit import same

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def layer(*shape: int) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 32), torch.randn(shape or (16, 64), requires_grad=True)


@pytest.mark.parametrize("name", ["softmax", "conv2d", "*", "linear.autocast", "softmax @ head"])
def test_what_is_no_product_is_refused(name: str) -> None:
    with pytest.raises(
        hmp.errors.OpListError, match=r"the FP8 list expected a matrix product .linear, matmul.*, got |on the FP8 list; for that one write"
    ):
        hmp.Policy(fp8={name})


def test_it_is_saved_and_loaded_and_told_as_json(tmp_path: Path) -> None:
    policy = hmp.Policy(name=tmp_path.name, fp8={"linear", "matmul @ *.mlp"}, bf16={"mm"}, fp8_recipe="rowwise")
    assert (policy.save(tmp_path) / "fp8.txt").read_text() == "linear\nmatmul @ *.mlp\n"
    assert (tmp_path / "recipe.txt").read_text() == "rowwise\n"
    assert hmp.Policy.load(tmp_path) == policy == hmp.Policy.from_dict(policy.to_dict())
    assert hmp.Policy.load(tmp_path).fingerprint == policy.fingerprint != policy.replace(fp8_recipe="tensorwise").fingerprint
    for kept in (
        policy.replace(name=tmp_path.name, fp8_kernel="emulate"),
        hmp.Policy(bf16={"mm"}, fp8_recipe="mxfp8", fp8_kernel="emulate"),
    ):
        assert hmp.Policy.load(kept.save(tmp_path)) == kept == hmp.Policy.from_dict(kept.to_dict())
    hmp.Policy(bf16={"mm"}).save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"bf16.txt", "fp32.txt", "promote.txt"}
    (tmp_path / "recipe.txt").write_text("best\n")
    with pytest.raises(hmp.errors.OpListError, match=r"expected tensorwise or rowwise or .*, got 'best'"):
        hmp.Policy.load(tmp_path)


def test_an_in_place_form_is_refused_with_the_reason_and_explained_as_what_it_does() -> None:
    with pytest.raises(
        hmp.errors.OpListError, match=r"expected a matrix product \(linear.*, got 'addmm_', which writes into its input and keeps its dtype"
    ):
        hmp.Policy(fp8={"addmm_"})
    policy = hmp.Policy(fp8={"addmm"})
    assert "(R5)" in hmp.explain("addmm_", policy).why and "FP8" not in hmp.explain("addmm_", policy).why
    into, left, right = torch.randn(16, 32), torch.randn(16, 32), torch.randn(32, 32)
    with hmp.casts(policy):
        got = into.clone().addmm_(left, right)
    assert torch.equal(got, torch.addmm(into, left, right))


ALL = hmp.Policy(fp8=set(PRODUCTS))


def run(function: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of the input and of all weights."""
    leaves = [x, *model.parameters()]
    y = function(x)
    gradient = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


@pytest.mark.slow
@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_has_eagers_result_and_gradients(recipe: str) -> None:
    model, x = layer(2, 32, 64)
    with hmp.casts(ALL.replace(fp8_recipe=recipe)):
        same(run(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x), run(model, model, x))


@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "strict"), [("rowwise", True), ("tensorwise", False)])
def test_a_program_exported_without_gradients_is_in_fp8(recipe: str, strict: bool) -> None:
    model, x = layer(3, 48, 64)
    other = torch.randn(5, 48, 64)
    with hmp.casts(ALL.replace(fp8_recipe=recipe)), torch.no_grad():
        exported = torch.export.export(
            model, (x,), dynamic_shapes={"input": {0: torch.export.Dim("batch", min=2, max=64)}}, strict=strict
        ).module()
        wanted = model(other)
    assert torch.equal(exported(other), wanted)
    assert not torch.equal(wanted, torch.nn.functional.linear(*(t.bfloat16() for t in (other, model.weight, model.bias))))


@pytest.mark.slow
@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
def test_one_with_gradients_is_in_the_low_dtype_and_counted() -> None:
    """An exported graph has no autograd.Function: gradients would be those of the rounding's steps."""
    model, x = layer(32, 64)
    before = sum(hmp.fallbacks().values())
    with hmp.casts(ALL):
        exported = torch.export.export(model, (x,), strict=False).module()
    assert sum(hmp.fallbacks().values()) > before
    assert any("export under torch.no_grad()" in reason for reason in hmp.fallbacks())
    with hmp.casts(hmp.Policy(bf16={"linear"})):
        wanted = run(model, model, x)
    y = exported(x)
    gradient = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    same([y, *torch.autograd.grad(y, [x, *exported.parameters()], gradient)], wanted)


def test_a_traced_product_is_not_decided_again_inside() -> None:
    """torch's decompositions are Python, and call the op that they are of."""
    model, x = layer(32, 64)
    weight = model.weight.detach()
    from torch.fx.experimental.proxy_tensor import make_fx

    with hmp.casts(ALL):
        traced = make_fx(torch.nn.functional.linear, tracing_mode="fake")(x.detach(), weight)
        wanted = torch.nn.functional.linear(x.detach(), weight)
    assert torch.equal(traced(x.detach(), weight), wanted)


class Block(nn.Module):
    """A router, an expert and an output layer, whose dtypes it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.lm_head = nn.Linear(16, 4, bias=False), nn.Linear(16, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"gate": self.gate(x), "up": self.up(x), "lm_head": self.lm_head(torch.relu(self.up(x)))}


ROUTER = hmp.Policy("router", bf16={"linear"}, fp32_result={"linear @ gate", "linear @ lm_head"})
GIVEN = torch.linspace(-2, 2, 48).view(3, 16)


def of_rounded(x: torch.Tensor, weight: torch.Tensor, low: torch.dtype = BF16) -> torch.Tensor:
    return x.to(low).float() @ weight.detach().to(low).float().T


def dtypes(results: dict[str, torch.Tensor]) -> dict[str, torch.dtype]:
    return {name: each.dtype for name, each in results.items()}


def test_entries_with_a_scope_keep_the_results_of_their_modules() -> None:
    model = hmp.apply(Block(), ROUTER)
    results = model(GIVEN)
    assert dtypes(results) == {"gate": F32, "up": BF16, "lm_head": F32}
    assert torch.equal(results["gate"], of_rounded(GIVEN, model.gate.weight))
    assert torch.equal(results["lm_head"], of_rounded(torch.relu(results["up"]), model.lm_head.weight))


@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
def test_so_they_do_in_compiled_code() -> None:
    model = hmp.apply(Block(), ROUTER)
    wanted = model(GIVEN)
    results = torch.compile(model, backend="eager", fullgraph=True)(GIVEN)
    assert dtypes(results) == dtypes(wanted) and all(torch.equal(results[name], wanted[name]) for name in wanted)
    for of in (results, wanted):
        model.zero_grad()
        sum(each.float().square().sum() for each in of.values()).backward()
        of["gradients"] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.equal(results["gradients"], wanted["gradients"])


def test_no_tool_takes_the_float32_result_for_a_violation() -> None:
    model = hmp.apply(Block(), ROUTER)
    with hmp.record() as report:
        model(GIVEN)
    assert report.verify().violations() == []
    rows = {row.module: row for row in report.rows if row.op == "linear"}
    assert {name: (row.rule, row.source, row.compute, row.output) for name, row in rows.items()} == {
        "gate": ("fp32_result", "linear @ gate", "bfloat16", "float32"),
        "up": ("bf16", "linear", "bfloat16", "bfloat16"),
        "lm_head": ("fp32_result", "linear @ lm_head", "bfloat16", "float32"),
    }
    report.assert_dtype("linear", BF16)
    hmp.verify(model, (GIVEN,))
    with hmp.detect_nonfinite():
        model(GIVEN)
    compared = hmp.compare(Block(), (GIVEN,), ROUTER)
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
    for one, other in (("fp32_result", "fp8"), ("fp32_result", "fp32"), ("fp8", "fp32")):
        with pytest.raises(hmp.errors.OpListError, match=r"'bmm' is on the .* list and on the .* list; take it off one of them"):
            hmp.Policy(**{one: {"bmm"}, other: {"bmm"}})


def test_a_scaler_passes_over_a_step_whose_rounded_gradient_overflows() -> None:
    model = hmp.apply(Block(), ROUTER.replace(dtype=F16))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**30), torch.optim.SGD(model.parameters(), lr=0.01)
    before = model.gate.weight.detach().clone()
    scaler.scale(model(GIVEN)["gate"].square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.gate.weight, before) and scaler.get_scale() == 2.0**29


def test_weights_that_are_cast_once_give_the_same_results() -> None:
    model = hmp.apply(Block(), ROUTER)
    with torch.no_grad():
        wanted = model(GIVEN)
        hmp.cast_weights(model, GIVEN)
        assert model.up.weight.dtype is BF16
        results = model(GIVEN)
    assert dtypes(results) == dtypes(wanted) and all(torch.equal(results[name], wanted[name]) for name in wanted)
