"""Quantising, element by element, against the formats' definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_oracle import MAXIMUM, finite_values, nearest, quantised, value_of_code
from hmp.fp8.quantising import Layout, quantise, transposed, values

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
    if draw(st.booleans()):
        matrix[numbers.integers(rows)] = 0
    return torch.from_numpy(matrix).to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


@given(matrices(), st.sampled_from(FORMS), st.sampled_from(KINDS), st.sampled_from([-1, -2]))
@settings(max_examples=300)
def test_codes_and_scales_are_those_of_the_definition(matrix: torch.Tensor, form: torch.dtype, kind: tuple[str, bool], axis: int) -> None:
    check(matrix, form, *kind, axis)


@pytest.mark.slow
@given(matrices(), st.sampled_from(FORMS), st.sampled_from(KINDS), st.sampled_from([-1, -2]))
@settings(max_examples=5000)
def test_codes_and_scales_are_those_of_the_definition_at_length(
    matrix: torch.Tensor, form: torch.dtype, kind: tuple[str, bool], axis: int
) -> None:
    check(matrix, form, *kind, axis)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("scaling", "power_of_two"), KINDS)
def test_zeros_have_scale_1_and_stay_zeros(form: torch.dtype, scaling: str, power_of_two: bool) -> None:
    found = quantise(torch.zeros(4, 32), Layout(form, scaling, power_of_two))
    assert (found.scale == (127 if scaling == "block" else 1)).all()
    assert not found.data.float().any()


@pytest.mark.parametrize("exponent", range(-120, 110, 7))
@pytest.mark.parametrize("form", FORMS)
def test_a_power_of_two_is_exact_next_to_powers_of_two(form: torch.dtype, exponent: int) -> None:
    """log2 in float32 rounds 448 / amax up to a power of two that amax does not fit."""
    edge = np.float32(MAXIMUM[form]) * np.float32(2.0**exponent)
    for amax in (edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf))):
        row = torch.tensor([[float(amax)] + [0.0] * 31])
        check(row, form, "row", True, -1)
        check(row, form, "block", True, -1)
        assert quantise(row, Layout(form, "row", True)).data.float().max() <= MAXIMUM[form]


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-30, 1e-20, 1e-13])
def test_small_magnitudes_are_scaled_as_far_as_a_scale_can_be_a_normal_number(amax: float) -> None:
    """torchao takes 1e-12 for everything below: a tensor of 1e-20 would become zeros."""
    found = values(quantise(torch.full((2, 32), amax), Layout(E4M3)))
    if amax >= 1e-30:
        assert torch.allclose(found, torch.full((2, 32), amax), rtol=1e-6, atol=0)
    assert found.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("scaling", "power_of_two"), KINDS)
@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_becomes_nan_and_the_rest_stays(form: torch.dtype, scaling: str, power_of_two: bool, special: float) -> None:
    torch.manual_seed(0)
    clean = torch.randn(4, 64)
    dirty = clean.clone()
    clean[1, 3] = 0  # no amax
    dirty[1, 3] = special
    layout = Layout(form, scaling, power_of_two)
    found, wanted = values(quantise(dirty, layout)), values(quantise(clean, layout))
    assert found[1, 3].isnan()
    found[1, 3] = wanted[1, 3]
    assert torch.equal(found, wanted)
