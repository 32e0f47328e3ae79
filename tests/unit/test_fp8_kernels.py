"""Quantising, element by element, against the formats' definition; torch's scaled product and the emulated one, and which runs where.

No public call shows codes and scales: a product shows their sum. None reaches the way of a GPU where there is none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from autocast_kit import needs_scaled_product
from fp8_oracle import MAXIMUM, finite_values, nearest, quantised, roundings, value_of_code
from hmp.fp8 import PRODUCTS, RECIPES, is_real, kernels, refusals, why_not
from hmp.fp8.quantization import Layout, quantise, transposed, values
from torch_has import TORCH

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMS = [E4M3, E5M2]
KINDS = [("tensor", False), ("tensor", True), ("row", True), ("row", False), ("block", True)]


def of_codes(form: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(form)


def equal(found: torch.Tensor, wanted: np.ndarray) -> bool:
    return np.array_equal(found.double().numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_the_oracle_and_torch_read_all_256_codes_alike(form: torch.dtype) -> None:
    assert equal(of_codes(form).float(), np.array([value_of_code(code, form) for code in range(256)]))
    assert finite_values(form)[-1] == MAXIMUM[form] == torch.finfo(form).max


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_every_number_of_the_format_stays_what_it_is_and_every_midpoint_goes_to_the_even_code(form: torch.dtype, scaling: str) -> None:
    known = finite_values(form)
    middles = (known[:-1] + known[1:]) / 2
    steps = np.concatenate([known, middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)]).astype(np.float32)
    signed = np.concatenate([steps, -steps])
    # beside the largest number the scale is 1, so each is rounded as it stands
    rows = [np.concatenate([[known[-1]], part]) for part in np.array_split(signed, int(np.ceil(len(signed) / 31)))]
    matrix = torch.tensor(np.array([np.pad(row, (0, 32 - len(row))) for row in rows]), dtype=torch.float32)
    found = quantise(matrix, Layout(form, scaling, scaling == "block"))
    assert equal(values(found).double(), nearest(matrix.numpy(), form))


def check(matrix: torch.Tensor, form: torch.dtype, scaling: str, power_of_two: bool, axis: int) -> None:
    found = quantise(matrix, Layout(form, scaling, power_of_two, axis))
    codes, factors = quantised(matrix, form, scaling, power_of_two, axis)
    data = found.data[: matrix.shape[0], : matrix.shape[1]]
    assert data.dtype is form and equal(data.float(), codes)
    assert not found.data.float().flatten()[: 0 if scaling != "block" else None].isnan().any() or not matrix.isfinite().all()
    scale = found.scale.double()
    if scaling == "block":
        scale = torch.from_numpy(2.0 ** (found.scale.numpy().astype(np.float64) - 127)).repeat_interleave(32, axis)
        scale = scale[: matrix.shape[0], : matrix.shape[1]]
    assert np.allclose(scale.expand(matrix.shape).numpy() * factors, 1.0, rtol=2**-23, atol=0)
    assert torch.equal(values(found), values(transposed(transposed(found)))) or not matrix.isfinite().all()


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0, 1, 5, 40]))  # powers of two between the elements
    matrix = numbers.standard_normal((rows, columns)) * 2.0 ** numbers.uniform(-spread, spread, (rows, columns))
    with np.errstate(over="ignore"):
        matrix = (matrix * 2.0 ** draw(st.integers(-140, 120))).astype(np.float32)
    for special in draw(st.lists(st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45]), max_size=4)):
        matrix[numbers.integers(rows), numbers.integers(columns)] = special
    zeros = draw(st.sampled_from(["none", "a row", "all"]))
    if zeros != "none":
        matrix[numbers.integers(rows) if zeros == "a row" else slice(None)] = 0
    return torch.from_numpy(matrix).to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


FORMATS = given(matrices(), st.sampled_from(FORMS), st.sampled_from(KINDS), st.sampled_from([-1, -2]))


def codes_and_scales(matrix: torch.Tensor, form: torch.dtype, kind: tuple[str, bool], axis: int) -> None:
    check(matrix, form, *kind, axis)


test_codes_and_scales_are_those_of_the_definition = settings(max_examples=20)(FORMATS(codes_and_scales))
test_codes_and_scales_are_those_of_the_definition_at_length = pytest.mark.nightly(settings(max_examples=5000)(FORMATS(codes_and_scales)))


@pytest.mark.parametrize("form", FORMS)
def test_a_power_of_two_is_exact_next_to_powers_of_two(form: torch.dtype) -> None:
    """log2 in float32 rounds 448 / amax up to a power of two that amax does not fit."""
    for exponent in range(-120, 110, 23):
        edge = np.float32(MAXIMUM[form]) * np.float32(2.0**exponent)
        for amax in (edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf))):
            row = torch.tensor([[float(amax)] + [0.0] * 31])
            check(row, form, "row", True, -1)
            check(row, form, "block", True, -1)
            assert quantise(row, Layout(form, "row", True)).data.float().max() <= MAXIMUM[form]


def test_what_rounds_up_to_2_to_the_128_is_inf_where_it_is_emulated() -> None:
    """The page on FP8 says so: 248 * 2**120 is halfway between two codes, and the upper one times its scale is no float32."""
    edge = np.float32(248 * 2.0**120)
    for scaling, power_of_two in KINDS[2:]:
        below, at = (
            values(quantise(torch.full((1, 32), float(v)), Layout(E4M3, scaling, power_of_two)))[0, 0]
            for v in (np.nextafter(edge, 0), edge)
        )
        assert torch.isfinite(below) and torch.isinf(at) == power_of_two


NAMES = list(RECIPES)
BF16 = torch.bfloat16
NEEDS_REFERENCE = pytest.mark.skipif(TORCH < (2, 8), reason="torch 2.7 has no scaled product on CPUs")


def gradients(op: str, args: tuple[torch.Tensor, ...], recipe: str, low: torch.dtype, kernel: str) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in args]
    y = PRODUCTS[op](*leaves, recipe=RECIPES[recipe], low_dtype=low, kernel=kernel)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(low))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@NEEDS_REFERENCE
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(("low", "rows"), [(BF16, 19), (torch.float16, 1)])
def test_the_real_and_the_emulated_product_agree(recipe: str, low: torch.dtype, rows: int) -> None:
    """On a CPU torch's is a slow reference; 19 rows are no multiple of 16, which the weight's gradient is summed over."""
    needs_scaled_product()
    for op, args in (
        ("linear", (torch.randn(rows, 32), torch.randn(48, 32), torch.randn(48))),
        ("bmm", (torch.randn(2, rows, 32), torch.randn(2, 32, 16))),
    ):
        pairs = zip(*(gradients(op, args, recipe, low, kernel) for kernel in ("real", "emulate")), strict=True)
        # a rounding the other way, and in the sum with a bias once more
        assert all(roundings(real.to(low), emulated.to(low), 1e4, 4.0) <= 1.01 for real, emulated in pairs)


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("shape", [(128, 64), (32, 32)])
def test_the_real_product_is_asked_for_as_torch_wants_it_on_a_gpu(
    recipe: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed here: torch's own checks of a fake GPU's tensors say whether strides, shapes and dtypes of scales are right."""
    if recipe == "mxfp8" and TORCH < (2, 13):
        pytest.skip("such a torch has no kernel for blocks, or none that hmp knows of: they are emulated")
    given: list[tuple[Any, ...]] = []
    own = kernels.scaled_mm
    assert own is not None

    def seen(left: torch.Tensor, right: torch.Tensor, *scales: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given.append((left.dtype, right.dtype, scales[0].dtype, kwargs["use_fast_accum"]))
        return own(left, right, *scales, **kwargs)

    monkeypatch.setattr(kernels, "scaled_mm", seen)
    how = RECIPES[recipe]
    with FakeTensorMode(), torch.no_grad():  # autograd asks for a real GPU's streams
        x, w = torch.empty(shape, device="cuda"), torch.empty(160, shape[1], device="cuda")
        y = PRODUCTS["linear"](x, w, recipe=how, low_dtype=BF16, kernel="real")
        # the operands of backward, laid out as kernels take them: no copy can be made on a GPU that is none
        grad, grad_t = torch.empty(shape[0], 160, device="cuda", dtype=BF16), torch.empty(160, shape[0], device="cuda", dtype=BF16)
        along_outer = quantise(grad, Layout(how.gradient, how.scaling, how.power_of_two))
        along_rows = quantise(grad_t, Layout(how.gradient, how.scaling, how.power_of_two))
        right = transposed(quantise(torch.empty(shape[1], 160, device="cuda"), Layout(E4M3, how.scaling_of_right, how.power_of_two)))
        left = transposed(quantise(torch.empty(shape[1], shape[0], device="cuda"), Layout(E4M3, how.scaling, how.power_of_two)))
        of_x = kernels.multiply(along_outer, right, BF16, real=True)
        of_w = kernels.multiply(along_rows, left, BF16, real=True)
    assert y.shape == (shape[0], 160) and y.dtype is BF16
    assert (of_x.shape, of_w.shape) == (x.shape, w.shape)
    of_gradient = torch.float8_e5m2 if recipe == "tensorwise" else E4M3
    scales = torch.float8_e8m0fnu if recipe == "mxfp8" else torch.float32
    assert given == [(E4M3, E4M3, scales, True), (of_gradient, E4M3, scales, False), (of_gradient, E4M3, scales, False)]


@pytest.mark.skipif(TORCH < (2, 11), reason="torchao 0.18 imports names that torch 2.7 lacks")
def test_scales_of_blocks_are_laid_out_as_torchao_lays_them_out() -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    for shape in ((128, 4), (19, 3), (300, 9), (1, 1)):
        scale = torch.randint(0, 255, shape, dtype=torch.uint8)
        assert torch.equal(kernels._swizzled(scale).view(torch.uint8), to_blocked(scale))


DEVICES: list[tuple[tuple[int, int], str | None, str, set[str]]] = [
    ((8, 0), None, "", set()),
    ((8, 9), None, "", set(NAMES) - {"mxfp8"}),
    ((10, 0), None, "", set(NAMES)),
    ((9, 4), "6.2", "gfx942:sramecc+:xnack-", set()),
    ((9, 0), "6.2", "gfx90a", set()),
    ((9, 5), "6.4", "gfx950:sramecc+:xnack-", set(NAMES) - {"mxfp8"}),
    ((12, 0), "6.4", "gfx1201", set(NAMES) - {"mxfp8"}),
]


def test_the_kernel_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for (major, minor), hip, arch, real in DEVICES:
        properties = SimpleNamespace(major=major, minor=minor, gcnArchName=arch)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
            patch.setattr(torch.version, "hip", hip)
            found = {name for name in NAMES if is_real("auto", torch.device("cuda", 0), RECIPES[name])}
        assert found == (real if TORCH >= (2, 13) else real - {"mxfp8"}), (major, minor, arch)
    assert not is_real("emulate", torch.device("cuda", 0), RECIPES["tensorwise"])
    assert not any(is_real("auto", torch.device(kind), RECIPES[name]) for name in NAMES for kind in ("cpu", "meta", "xpu", "mps"))
    monkeypatch.setattr(kernels, "scaled_mm", None)  # without torch's kernel every device is emulated
    assert not is_real("auto", torch.device("cuda", 0), RECIPES["tensorwise"])


def test_a_device_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_WITHOUT_FLOAT8", frozenset({"cpu"}))
    assert why_not("linear", (torch.ones(3, 16), torch.ones(32, 16)), {}, RECIPES["rowwise"], BF16) == "no float8 on this device"
