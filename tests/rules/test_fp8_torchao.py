"""The same numbers as torchao's Float8Linear and MXFP8Linear, emulated, under the recipe of the same name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_oracle import RECIPES, in_fp8, roundings
from torch_has import TORCH

if TORCH < (2, 11):
    pytest.skip("torchao 0.18 imports names that torch 2.7 lacks", allow_module_level=True)

from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice, MXFP8Dim1CastKernelChoice, ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference


def float8_linear(recipe: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)  # the class is frozen, and names of recipes come without it
    plain = torch.nn.Linear(w.shape[1], w.shape[0], bias=b is not None)
    plain.weight = w
    plain.bias = b
    return Float8Linear.from_float(plain, config)(x)


def mx_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    e4m3 = torch.float8_e4m3fn
    kernels = (KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
    result = mx_mm.apply(x, w, e4m3, e4m3, e4m3, 32, *kernels, ScaleCalculationMode.RCEIL, False)
    return result if b is None else result + b.to(result.dtype)


@st.composite
def layers(draw: st.DrawFn, recipe: str) -> tuple[torch.Tensor, ...]:
    step = 32 if recipe == "mxfp8" else 16
    low = torch.bfloat16 if recipe == "mxfp8" else draw(st.sampled_from([torch.bfloat16, torch.float16]))
    rows = draw(st.integers(1, 3)) * 32 if recipe == "mxfp8" else draw(st.integers(1, 40))
    inner, outer = draw(st.integers(1, 4)) * step, draw(st.integers(1, 4)) * step
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    most = 3 if low is torch.float16 else 30  # powers of two
    x = torch.randn(rows, inner) * 2.0 ** draw(st.integers(-most, most))
    if draw(st.booleans()):
        x = x * 2.0 ** torch.randint(-8, 8, (rows, 1)) * (torch.rand(rows, inner) < 0.9)
    w = torch.randn(outer, inner) * 2.0 ** draw(st.integers(-6, 6))
    grad = torch.randn(rows, outer) * 2.0 ** draw(st.integers(-8, 3))
    b = torch.randn(outer) if draw(st.booleans()) else None
    weights = low if recipe == "mxfp8" else draw(st.sampled_from([torch.float32, low]))  # torchao multiplies in the operands' dtypes
    return tuple(None if t is None else t.to(dtype) for t, dtype in ((x, low), (w, weights), (b, weights), (grad, low)))


def check(recipe: str, layer: tuple[torch.Tensor, ...]) -> None:
    """Forward and gradients are as near as two sums in float32, of the same terms in another order, and their roundings leave them."""
    x, w, b, grad = layer
    found, wanted = [], []
    for results, is_hmp in ((found, True), (wanted, False)):
        leaves = [x.clone().requires_grad_(), torch.nn.Parameter(w.clone()), None if b is None else torch.nn.Parameter(b.clone())]
        if is_hmp:
            y = in_fp8("linear", *leaves, recipe=recipe, low=x.dtype)
        else:
            y = mx_linear(*leaves) if recipe == "mxfp8" else float8_linear(recipe, *leaves)
        y.backward(grad)
        results += [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]
    absolute_x, absolute_w, absolute_g = x.double().abs(), w.double().abs(), grad.double().abs()
    terms = [absolute_x @ absolute_w.T, absolute_g @ absolute_w, absolute_g.T @ absolute_x, absolute_g.sum(0)]
    for mine, theirs, bound in zip(found, wanted, terms, strict=False):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        # float32 weights get gradients that were rounded to the low-precision dtype; in float16 they may be too large for it
        low_mine, low_theirs = mine.to(x.dtype), theirs.to(x.dtype)
        assert torch.equal(low_mine.isfinite(), low_theirs.isfinite())
        finite = low_theirs.isfinite()
        # The product is rounded, and so is its sum with the bias: one that was rounded the other way differs by a step of its own size,
        # also where the bias nearly cancels it, and the sums then by one of theirs (1.54 roundings together were seen).
        plus_bias = b is not None and mine is found[0]
        beside = b.double().abs().expand(theirs.shape) if plus_bias else torch.zeros(theirs.shape)
        assert roundings(low_mine[finite], low_theirs[finite], bound[finite], beside[finite]) <= (2 if plus_bias else 1.001)


@pytest.mark.parametrize("recipe", RECIPES)
@given(st.data())
@settings(max_examples=10)
def test_forward_and_gradients_are_torchaos(recipe: str, data: st.DataObject) -> None:
    check(recipe, data.draw(layers(recipe)))


def test_the_comparison_tells_recipes_apart() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(32, 64).bfloat16(), torch.randn(32, 64)
    mine = in_fp8("linear", x, w, recipe="rowwise")
    assert roundings(mine, float8_linear("tensorwise", x, torch.nn.Parameter(w), None).detach(), 1e3) > 2
