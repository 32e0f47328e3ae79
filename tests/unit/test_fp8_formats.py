"""Quantising, element by element, against the formats' definition.

No public call shows codes and scales: a product shows their sum.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_oracle import MAXIMUM, finite_values, nearest, quantised, value_of_code
from hmp.fp8.quantization import Layout, quantise, transposed, values

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
