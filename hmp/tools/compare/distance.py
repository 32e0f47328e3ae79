"""How far a tensor is from its reference, relative to it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

# Beyond this a value stands for an infinity (a mask), and would hide every other one in a norm.
LARGE = 2.0**100
# A block's sum of squares is off by a few units of float32 at most; with norms from here on, no square that counts is subnormal.
_BLOCK, _LEAST_BY_BLOCKS = 512, 1e-10


def distance(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||got - reference|| / ||reference|| over all elements, without masks.

    Masks are what is NaN in both, or infinite or beyond 2**100 with the same sign in both. If the reference is such a value, half of
    2**100, or half of the largest number of a dtype with less range, is enough in `got`. The distance is infinite where one of the two
    alone is NaN, infinite, or beyond 2**100, or where they are that with different signs.
    """
    return ratio(*error_and_size(got, reference))


def total(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """Return the relative distance of all tensors as one vector, None for no tensor; each counts by the size of its reference."""
    errors = sizes = 0.0
    found = False
    for got, reference in pairs:
        found = True
        error, size = error_and_size(held(got), held(reference))
        errors += error**2
        sizes += size**2
    return ratio(math.sqrt(errors), math.sqrt(sizes)) if found else None


def error_and_size(got: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return ||got - reference|| and ||reference|| without masked elements.

    The error is infinite where a NaN, an infinity, or what stands for one, is in one of the two alone.
    """
    limits = [min(LARGE, torch.finfo(each.dtype).max) / 2 for each in (got, reference)]
    got, reference = as_real(widened(got)), as_real(reference)
    dtype = torch.promote_types(torch.promote_types(got.dtype, reference.dtype), torch.float32)
    got, reference = got.detach().to(dtype), reference.detach().to(dtype)
    size = _norm(reference)
    if not size < LARGE:  # NaN too
        known = reference.abs() < LARGE
        kinds = [_infinities(each[~known], limit) for each, limit in zip((got, reference), limits, strict=True)]
        got, reference = got[known], reference[known]
        size = _norm(reference)
        if not torch.equal(*kinds):
            return math.inf, size
    error = _norm(got - reference)
    return error if error < LARGE else math.inf, size


def _infinities(tensor: torch.Tensor, least: float) -> torch.Tensor:
    """Return what each element stands for: 1 or -1 for an infinity, which numbers from `least` on are, 2 for NaN, 0 for a number."""
    return torch.where(tensor.abs() < least, 0.0, tensor.clamp(-1.0, 1.0).nan_to_num(2.0))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, one in FP8 as float32: torch promotes no FP8 and answers no question about its values."""
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a complex tensor holds, two for each element; a real tensor itself."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Of a sparse tensor the values that it holds, which the reference holds at the same places; another tensor itself."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor


def _norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm, summed in float64. Contiguous float32 is first summed in blocks in float32, three times as fast."""
    norm = torch.linalg.vector_norm
    if tensor.dtype is torch.float32 and tensor.numel() % _BLOCK == 0 and tensor.is_contiguous():
        found = float(norm(norm(tensor.view(-1, _BLOCK), dim=1), dtype=torch.float64))
        if _LEAST_BY_BLOCKS < found < math.inf:
            return found
    return float(norm(tensor, dtype=torch.float64))


def ratio(error: float, norm: float) -> float:
    """Return an error relative to a norm.

    0 where there is no error, infinite where there is one and nothing that it could be relative to.
    """
    return error / norm if norm else math.inf if error else 0.0
