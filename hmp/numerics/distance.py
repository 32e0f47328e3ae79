"""How far a tensor is from its reference: relative to it, and in units of bfloat16's spacing."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Beyond this a value stands for an infinity (a mask), and would hide every other one in a norm.
LARGE = 2.0**100
_SMALLEST = -125  # the exponent, as frexp has it, of bfloat16's smallest normal number


class Distance(NamedTuple):
    """`relative` is ||got - reference|| / ||reference||; `ulps` is ||got - reference|| / ||spacing of bfloat16 at the reference||.

    Infinite where `got` is not finite and the reference is.
    """

    relative: float
    ulps: float


def distance(got: torch.Tensor, reference: torch.Tensor) -> Distance:
    """The distance over all elements, summed in float64; masked elements, infinite or beyond 2**100 in both, do not count.

    The spacing of bfloat16 at v, one ulp, is 2 ** (floor(log2 |v|) - 7): a value rounded to bfloat16 is at most half of it away.
    """
    got, reference = as_real(widened(got)), as_real(reference)
    dtype = torch.promote_types(torch.promote_types(got.dtype, reference.dtype), torch.float32)
    got, reference = got.detach().to(dtype), reference.detach().to(dtype)
    known = reference.abs() < LARGE  # false for NaN
    if not bool(known.all()):
        got, reference = got[known], reference[known]
    error = _norm(got - reference)
    if not math.isfinite(error):
        return Distance(math.inf, math.inf)
    if error == 0.0:
        return Distance(0.0, 0.0)
    _, exponent = torch.frexp(reference)
    exponent = torch.where(reference == 0, _SMALLEST, exponent).clamp(min=_SMALLEST)
    spacing = torch.ldexp(torch.ones_like(reference), exponent - 8)
    return Distance(_ratio(error, _norm(reference)), _ratio(error, _norm(spacing)))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, one in FP8 as float32: torch promotes no FP8 and answers no question about its values."""
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a complex tensor holds, two for each element; a real tensor itself."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _ratio(error: float, norm: float) -> float:
    return error / norm if norm else math.inf
