"""FP8 by its definition, in numpy: every code's value, the nearest code, the scales, and products of three operands' roles."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import hmp

MAXIMUM = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LARGEST_FACTOR = 2.0**126


def value_of_code(code: int, form: torch.dtype) -> float:
    """OCP's 8-bit formats: e4m3 has 4 bits of exponent with bias 7 and one NaN of each sign, e5m2 is IEEE's layout with bias 15."""
    sign, bits = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if form is torch.float8_e4m3fn:
        exponent, mantissa, bias, size = bits >> 3, bits & 7, 7, 8
        if bits == 0x7F:
            return float("nan")
    else:
        exponent, mantissa, bias, size = bits >> 2, bits & 3, 15, 4
        if exponent == 31:
            return float("nan") if mantissa else sign * float("inf")
    return sign * (mantissa / size * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / size) * 2.0 ** (exponent - bias))


def finite_values(form: torch.dtype) -> np.ndarray:
    """The finite numbers from 0 on, by code: as the codes grow, so do they."""
    found = np.array([value_of_code(code, form) for code in range(128)])
    return found[np.isfinite(found)]


def nearest(numbers: np.ndarray, form: torch.dtype) -> np.ndarray:
    """Each finite number as the format's nearest, ties to the even code, beyond the largest the largest; NaN for what is not finite."""
    known = finite_values(form)
    magnitude = np.minimum(np.abs(numbers.astype(np.float64)), known[-1])
    above = np.clip(np.searchsorted(known, np.where(np.isfinite(magnitude), magnitude, 0.0)), 1, len(known) - 1)
    low, high = known[above - 1], known[above]
    to_high = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    found = np.copysign(np.where(to_high, high, low), numbers)
    return np.where(np.isfinite(numbers), found, np.nan)


def factor(amax: float, form: torch.dtype, power_of_two: bool) -> float:
    """What values are multiplied with so that the largest becomes the format's largest: rounded to float32, or down to a power of two."""
    if amax == 0:
        return 1.0
    exact = Fraction(MAXIMUM[form]) / Fraction(amax)
    if not power_of_two:
        with np.errstate(over="ignore"):
            return float(min(np.float32(MAXIMUM[form]) / np.float32(amax), np.float32(LARGEST_FACTOR)))
    exponent = 0
    while Fraction(2) ** exponent > exact:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    return 2.0 ** min(exponent, 126)


def quantised(matrix: torch.Tensor, form: torch.dtype, scaling: str, power_of_two: bool, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes' values, the factor of each element) of a matrix; by element, in float64."""
    given = matrix.detach().to(torch.float64).numpy()
    if axis == -2:
        values, factors = quantised(matrix.T, form, scaling, power_of_two, -1)
        return values.T, factors.T
    magnitudes = np.where(np.isfinite(given), np.abs(given), 0.0)
    factors = np.empty_like(given)
    width = {"tensor": 0, "row": given.shape[1], "block": 32}[scaling]
    if scaling == "tensor":
        factors[:] = factor(float(magnitudes.max()), form, power_of_two)
    else:
        for row in range(given.shape[0]):
            for start in range(0, given.shape[1], width):
                part = magnitudes[row, start : start + width]
                factors[row, start : start + width] = factor(float(part.max()), form, power_of_two)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (given.astype(np.float32) * factors.astype(np.float32)).astype(np.float64)
    return nearest(scaled, form), factors


def dequantised(matrix: torch.Tensor, form: torch.dtype, scaling: str, power_of_two: bool, axis: int) -> torch.Tensor:
    """The matrix as the quantised one gives it back, in float64."""
    values, factors = quantised(matrix, form, scaling, power_of_two, axis)
    return torch.from_numpy(values / factors)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# recipe → (scaling, of the right operand in the gradient of left, powers of two, the gradient's format, gradient of right in FP8)
BY_NAME: dict[str, tuple[str, str, bool, torch.dtype, bool]] = {
    "tensorwise": ("tensor", "tensor", False, E5M2, True),
    "rowwise": ("row", "row", True, E4M3, True),
    "rowwise_with_gw_hp": ("row", "tensor", True, E4M3, False),
    "mxfp8": ("block", "block", True, E4M3, True),
}


RECIPES = list(BY_NAME)
PRODUCTS = ("linear", "matmul", "linalg.matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "addbmm")


@functools.cache
def policy(op: str, recipe: str = "tensorwise", low: torch.dtype = torch.bfloat16) -> hmp.Policy:
    """The op alone, on the FP8 list."""
    return hmp.Policy("fp8", dtype=low, fp8={op}, fp8_recipe=recipe)


def function(op: str) -> Any:
    return torch.nn.functional.linear if op == "linear" else getattr(torch, op)


def in_fp8(op: str, *args: Any, recipe: str = "tensorwise", low: torch.dtype = torch.bfloat16, **kwargs: Any) -> torch.Tensor:
    """The op's result under that policy; a call that did not run in FP8 is an error."""
    before = hmp.fallbacks()
    with hmp.casts(policy(op, recipe, low)):
        found = function(op)(*args, **kwargs)
    assert hmp.fallbacks() == before
    return found


def product(left: torch.Tensor, right: torch.Tensor, recipe: str) -> torch.Tensor:
    """`left @ right` of two matrices, in float64."""
    scaling, _, power_of_two, _, _ = BY_NAME[recipe]
    return dequantised(left, E4M3, scaling, power_of_two, -1) @ dequantised(right, E4M3, scaling, power_of_two, -2)


def gradients(left: torch.Tensor, right: torch.Tensor, grad: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of left and of right, in float64."""
    scaling, of_right, power_of_two, form, right_in_fp8 = BY_NAME[recipe]
    of_left = dequantised(grad, form, scaling, power_of_two, -1) @ dequantised(right.T, E4M3, of_right, power_of_two, -2)
    if not right_in_fp8:
        return of_left, left.detach().to(grad.dtype).double().T @ grad.double()
    along_rows = dequantised(grad, form, scaling, power_of_two, -2)
    return of_left, dequantised(left.T, E4M3, scaling, power_of_two, -1) @ along_rows


def roundings(found: torch.Tensor, wanted: torch.Tensor, terms: Any, beside: Any = 0.0) -> float:
    """How far `found` is from `wanted` at most, in units of one rounding to its dtype; what sums in float32 may lose does not count.

    `terms` bounds the sum of the magnitudes of the terms that each element is a sum of. `beside` is the magnitude of what was added to a
    rounded sum.
    """
    info = torch.finfo(found.dtype)
    wanted = wanted.detach()
    unit = (wanted.double().abs() + beside).clamp(min=info.tiny) * info.eps
    lost = 2.0**-22 * torch.as_tensor(terms, dtype=torch.float64)
    away = ((found.detach().double() - wanted.double()).abs() - lost).clamp(min=0)
    return float((away / unit).max()) if away.numel() else 0.0
