"""A tensor in few numbers, which are the same on every machine: moments, and a hash of its bytes.

Moments are computed in float64, which no policy and no torch.autocast region casts.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from ..numerics.distance import as_real, widened

Tensor = torch.Tensor
_BLOCK = 2**18  # elements at a time: a copy in float64 of a large tensor would be large itself


class Moments(NamedTuple):
    """Of the finite elements of a tensor: the Euclidean norm, the mean, and the largest magnitude; and how many are not finite."""

    norm: float
    mean: float
    largest: float
    nonfinite: int


def values_of(tensor: Tensor) -> Tensor:
    """Return the real numbers of a tensor, in a dtype that torch computes in; of a complex one two for each element, side by side."""
    values = as_real(widened(tensor.detach().resolve_neg()))
    return values.flatten(-2) if tensor.is_complex() and tensor.dim() else values


def bits(values: Tensor) -> str:
    """Return a hash of the bytes, in the order of the elements."""
    plain = values.detach().to("cpu").reshape(-1).contiguous()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def moments(values: Tensor) -> Moments:
    """Return the moments of `values`."""
    squares = total = largest = known = 0.0
    for block in values.reshape(-1).split(_BLOCK):
        wide = block.to(torch.float64)
        if not block.numel():
            break
        finite = wide.isfinite()
        wide = wide.where(finite, 0.0)
        parts = torch.stack([wide.square().sum(), wide.sum(), wide.abs().amax(), finite.sum(dtype=torch.float64)]).tolist()
        squares, total, largest, known = squares + parts[0], total + parts[1], max(largest, parts[2]), known + parts[3]
    return Moments(squares**0.5, total / known if known else 0.0, largest, values.numel() - int(known))
