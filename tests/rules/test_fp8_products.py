"""Each product of the list and its gradients, against quantised operands multiplied in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hmp
from fp8_oracle import RECIPES, gradients, in_fp8, product, roundings

BF16 = torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, grad: bool = False) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_(grad)


def close(found: torch.Tensor, wanted: torch.Tensor, terms: float = 1e4, most: float = 0.51) -> None:
    assert found.shape == wanted.shape
    assert roundings(found, wanted, terms) <= most


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- linear: forward, every gradient, the leaf's dtype ---------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("low", "dtypes", "rows"),
    [
        (BF16, (torch.float32, torch.float32), 33),
        (BF16, (BF16, BF16), 1),
        (torch.float16, (torch.float32, BF16), 7),
        (torch.float16, (torch.float16, torch.float32), 64),
    ],
)
def test_r20_linear_and_its_gradients(recipe: str, low: torch.dtype, dtypes: tuple[torch.dtype, torch.dtype], rows: int) -> None:
    x, w, b = tensor(rows, 64, dtype=dtypes[0], grad=True), tensor(96, 64, dtype=dtypes[1], grad=True), tensor(96, grad=True)
    y = in_fp8("linear", x, w, recipe=recipe, low=low)
    assert y.dtype is low
    close(y, product(x, w.T, recipe))
    grad = torch.randn(rows, 96).to(low)
    y.backward(grad)
    of_x, of_w = gradients(x, w.T, grad, recipe)
    assert (x.grad.dtype, w.grad.dtype) == dtypes
    # rounded to the low-precision dtype, and to the leaf's where that is coarser
    close(x.grad if dtypes[0] is BF16 else x.grad.to(low), of_x, most=0.6)
    close(w.grad if dtypes[1] is BF16 else w.grad.to(low), of_w.T, most=0.6)
    with_bias = in_fp8("linear", x, w, b, recipe=recipe, low=low)
    assert torch.equal(with_bias, y + b.to(low))
    with_bias.backward(grad)
    assert b.grad.dtype is torch.float32
    assert torch.equal(b.grad, grad.sum(0).float())


@pytest.mark.parametrize("recipe", RECIPES)
def test_neither_dimensions_nor_strides_matter(recipe: str) -> None:
    x, w = tensor(48, 64), tensor(32, 64)
    wanted = in_fp8("linear", x, w, recipe=recipe)
    for shape in ((2, 24, 64), (2, 1, 24, 64)):
        assert torch.equal(in_fp8("linear", x.view(shape), w, recipe=recipe), wanted.view(*shape[:-1], 32))
    assert in_fp8("linear", x[0], w, recipe=recipe).shape == (32,)
    for strided_x, strided_w in (
        (x.T.contiguous().T, w),
        (x, w.T.contiguous().T),
        (torch.stack([x, x], -1)[..., 0], torch.cat([w, w])[:32]),
        (torch.cat([x, x], 1)[:, :64], torch.cat([w, w], 1)[:, 64:]),
    ):
        assert torch.equal(in_fp8("linear", strided_x, strided_w, recipe=recipe), wanted)
    expanded = x[:1].expand(48, 64).requires_grad_()
    in_fp8("linear", expanded, w, recipe=recipe).sum().backward()


# --- the other ops: each is built from products of matrices ---------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_mm_and_addmm(recipe: str) -> None:
    low = BF16 if recipe == "rowwise" else torch.float16
    a, b, c = tensor(24, 64, grad=True), tensor(64, 32, grad=True), tensor(32, grad=True)
    found = in_fp8("mm", a, b, recipe=recipe, low=low)
    close(found, product(a, b, recipe))
    grad = torch.randn(24, 32).to(low)
    found.backward(grad)
    of_a, of_b = gradients(a, b, grad, recipe)
    close(a.grad.to(low), of_a)
    close(b.grad.to(low), of_b)
    assert torch.equal(in_fp8("addmm", c, a, b, recipe=recipe, low=low), found + c.to(low))
    scaled = in_fp8("addmm", c, a, b, beta=0.5, alpha=-2, recipe=recipe, low=low)
    close(scaled, 0.5 * c.detach().to(low).double() - 2 * found.double(), most=1.01)
    scaled.backward(grad)
    close(c.grad.to(low), 0.5 * grad.double().sum(0), most=1.01)
    poisoned = torch.full((32,), float("nan"))
    assert torch.equal(in_fp8("addmm", poisoned, a, b, beta=0, recipe=recipe, low=low), found)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "tensorwise"])
def test_a_batch_is_its_matrices(recipe: str) -> None:
    a, b, c = tensor(3, 24, 64, grad=True), tensor(3, 64, 32, grad=True), tensor(3, 24, 32)
    grad = torch.randn(3, 24, 32).to(BF16)
    for op, found in (("bmm", in_fp8("bmm", a, b, recipe=recipe)), ("matmul", in_fp8("matmul", a, b, recipe=recipe))):
        of_a, of_b = torch.autograd.grad(found, (a, b), grad)
        for i in range(3):
            close(found[i], product(a[i], b[i], recipe))
            if recipe == "rowwise_with_gw_hp":  # there the second operand has one scale in its gradient's product, the batch's
                continue
            wanted = gradients(a[i], b[i], grad[i], recipe)
            close(of_a[i].to(BF16), wanted[0])
            close(of_b[i].to(BF16), wanted[1])
        assert op
    assert torch.equal(in_fp8("baddbmm", c, a, b, recipe=recipe), in_fp8("bmm", a, b, recipe=recipe) + c.to(BF16))


def test_one_scale_is_that_of_the_whole_batch() -> None:
    a, b = tensor(3, 16, 32), tensor(3, 32, 16)
    a[0] *= 100
    wanted = [product(torch.cat([a[i], a[0]]), torch.cat([b[i], *list(b)], 1), "tensorwise")[:16, :16] for i in range(3)]
    close(in_fp8("bmm", a, b, recipe="tensorwise"), torch.stack(wanted))


@pytest.mark.parametrize("recipe", RECIPES)
def test_addbmm_is_one_sum(recipe: str) -> None:
    a, b, c = tensor(2, 24, 32, grad=True), tensor(2, 32, 64, grad=True), tensor(24, 64)
    side_by_side, below = torch.cat(list(a), 1), torch.cat(list(b), 0)
    found = in_fp8("addbmm", c, a, b, recipe=recipe)
    summed = product(side_by_side, below, recipe).to(BF16)
    close(found, summed.double() + c.to(BF16).double(), most=1.51, terms=1e5)
    grad = torch.randn(24, 64).to(BF16)
    found.backward(grad)
    of_a, of_b = gradients(side_by_side, below, grad, recipe)
    close(a.grad.to(BF16), torch.stack(of_a.split(32, 1)))
    close(b.grad.to(BF16), torch.stack(of_b.split(32, 0)))


SHAPES = [((24, 64), (64, 32)), ((5, 24, 64), (64, 32)), ((2, 5, 24, 64), (2, 5, 64, 32)), ((2, 1, 24, 64), (5, 64, 32)),
          ((24, 64), (5, 64, 32)), ((1, 24, 64), (1, 64, 32))]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_matmul_broadcasts(recipe: str) -> None:
    for left, right in SHAPES:
        a, b = tensor(*left, grad=True), tensor(*right, grad=True)
        found = in_fp8("matmul", a, b, recipe=recipe)
        exact = torch.matmul(a, b)
        assert found.shape == exact.shape
        assert float((found.float() - exact).norm() / exact.norm()) < 0.05
        grad = torch.randn(found.shape)
        for mine, plain in zip(torch.autograd.grad(found, (a, b), grad.to(BF16)), torch.autograd.grad(exact, (a, b), grad), strict=True):
            assert mine.shape == plain.shape
            assert float((mine - plain).norm() / plain.norm()) < 0.1


# --- out=, tied weights, inference, casts and autocast around it ----------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_r6_out_takes_the_result_in_its_own_dtype(recipe: str) -> None:
    a, b, c = tensor(24, 64), tensor(64, 32), tensor(24, 32)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("mm", (a, b)), ("matmul", (a, b)), ("addmm", (c, a, b)), ("bmm", (a[None], b[None])),
        ("baddbmm", (c[None], a[None], b[None])), ("addbmm", (c, a[None], b[None])),
    ]  # fmt: skip
    for op, args in calls:
        wanted = in_fp8(op, *args, recipe=recipe)
        for dtype in (BF16, torch.float32):
            out = torch.full(wanted.shape, 7.0, dtype=dtype)
            assert in_fp8(op, *args, out=out, recipe=recipe) is out
            assert torch.equal(out, wanted.to(dtype))
    into_itself = c.clone()
    in_fp8("addmm", into_itself, a, b, out=into_itself, recipe=recipe)
    assert torch.equal(into_itself, in_fp8("addmm", c, a, b, recipe=recipe).float())


def test_r8_r17_what_a_product_is_made_of_is_not_cast() -> None:
    """With every op of torch on a list, or in a region of torch.autocast, the product is what it is without."""
    x, w, b = tensor(16, 64, grad=True), tensor(32, 64, grad=True), tensor(32)

    def results(policy: hmp.Policy) -> list[torch.Tensor]:
        with hmp.casts(policy):
            found = torch.nn.functional.linear(x, w, b)
        return [found, *torch.autograd.grad(found, (x, w), torch.ones_like(found))]

    for recipe in RECIPES:
        alone = hmp.Policy(fp8={"linear"}, fp8_recipe=recipe)
        found = [results(alone.replace(bf16={"*"})), results(alone.replace(fp32={"*"}))]
        with torch.autocast("cpu", torch.float16):
            found.append(results(alone))
        for each in found:
            assert all(torch.equal(*pair) for pair in zip(each, results(alone), strict=True)), recipe


# --- what is not finite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_number_that_is_not_finite_is_seen_where_it_counts_and_nowhere_else(recipe: str) -> None:
    for special in (float("inf"), float("nan")):
        x, w = tensor(48, 64), tensor(32, 64)
        x[5, 7] = 0
        wanted = in_fp8("linear", x, w, recipe=recipe)
        x[5, 7] = special
        found = in_fp8("linear", x, w, recipe=recipe)
        assert found[5].isnan().all()
        found[5] = wanted[5]
        assert torch.equal(found, wanted)
        w[3, 0] = special
        assert in_fp8("linear", tensor(48, 64), w, recipe=recipe)[:, 3].isnan().all()
        x, w = tensor(48, 64, grad=True), tensor(32, 64, grad=True)
        grad = torch.randn(48, 32).to(BF16)
        grad[2, 3] = special
        in_fp8("linear", x, w, recipe=recipe).backward(grad)
        assert not x.grad[2].isfinite().any() and x.grad[[0, 1, 3]].isfinite().all()
        assert not w.grad[3].isfinite().any() and w.grad[[0, 1, 2]].isfinite().all()
