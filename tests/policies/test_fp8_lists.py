"""The FP8 list: what may stand on it, where it is read from and written to, what it wins over, and which calls run in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hmp

F32, BF16 = torch.float32, torch.bfloat16
LINEAR = hmp.Policy(fp8={"linear"})


def layer(rows: int = 32, columns: int = 16) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(rows, columns), torch.randn(16, rows, requires_grad=True)


def by_hand(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x @ weight.T with both rounded to float8_e4m3fn under one scale each, in float64, and then to bfloat16."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = 448 / tensor.detach().abs().max().double()
        return (tensor.detach() * scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn).double() / scale

    return (rounded(x) @ rounded(weight).t()).to(BF16) + bias.detach().to(BF16)


def test_a_linear_on_the_list_runs_in_fp8_and_its_gradients_arrive_in_float32() -> None:
    model, x = layer()
    with hmp.casts(LINEAR):
        y = model(x)
    y.float().square().mean().backward()
    expected = by_hand(x, model.weight, model.bias)
    assert y.dtype is BF16
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)  # one rounding of the low-precision dtype
    assert not torch.equal(y.float(), torch.nn.functional.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16()).float())
    for leaf in (x, model.weight, model.bias):
        assert leaf.grad is not None and leaf.grad.dtype is F32 and leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["softmax", "conv2d", "*", "linear.autocast", "softmax @ head"])
def test_what_is_no_product_is_refused(name: str) -> None:
    with pytest.raises(
        hmp.OpListError,
        match=r"the FP8 list expected a matrix product .linear, matmul.*, got |on the FP8 list; for that one write",
    ):
        hmp.Policy(fp8={name})


def test_an_op_on_the_fp8_and_the_fp32_list_is_refused_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "fp8.txt").write_text("matmul\nlinear\n")
    (tmp_path / "fp32.txt").write_text("linear\n")
    with pytest.raises(hmp.OpListError, match=r"'linear' is on the FP8 list and on the FP32 list .*fp32.txt:1.; take it off one of them"):
        hmp.Policy.load(tmp_path)


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
    with pytest.raises(hmp.OpListError, match=r"expected tensorwise or rowwise or .*, got 'best'"):
        hmp.Policy.load(tmp_path)


def test_converts_file_wins_over_the_default_lists(tmp_path: Path) -> None:
    (tmp_path / "fp8.txt").write_text("linear\n")
    model, x = layer()
    with hmp.convert(fp8_file_path=tmp_path / "fp8.txt"):
        got = model(x)
        explained = hmp.explain("linear")
    assert explained.cast == "fp8" and explained.path == str(tmp_path / "fp8.txt")
    torch.testing.assert_close(got, by_hand(x, model.weight, model.bias), rtol=2**-7, atol=2**-7)


def test_an_in_place_form_is_refused_with_the_reason_and_explained_as_what_it_does() -> None:
    with pytest.raises(
        hmp.OpListError,
        match=r"expected a matrix product \(linear.*, got 'addmm_', which writes into its input and keeps its dtype",
    ):
        hmp.Policy(fp8={"addmm_"})
    policy = hmp.Policy(fp8={"addmm"})
    assert "(R5)" in hmp.explain("addmm_", policy).why and "FP8" not in hmp.explain("addmm_", policy).why
    into, left, right = torch.randn(16, 32), torch.randn(16, 32), torch.randn(32, 32)
    with hmp.casts(policy):
        got = into.clone().addmm_(left, right)
    assert torch.equal(got, torch.addmm(into, left, right))
