"""A tensor in few numbers, which are the same on every machine: moments, a hash of its bits, random projections, and a sample.

Everything is computed in float64 or in integers, which no policy and no torch.autocast region casts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..numerics.distance import as_real, widened

Tensor = torch.Tensor
BUCKETS = 257  # a prime: what stands at one place of each row is spread over all of them
_BLOCK = BUCKETS * 1024  # as many elements at a time: a copy in float64 or int64 of a large tensor would be large itself
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Moments(NamedTuple):
    """Of the finite elements of a tensor: the Euclidean norm, the mean, and the largest magnitude; and how many are not finite."""

    norm: float
    mean: float
    largest: float
    nonfinite: int


def values_of(tensor: Tensor) -> Tensor:
    """The real numbers of a tensor, in a dtype that torch computes in; of a complex one two for each element, side by side."""
    values = as_real(widened(tensor.detach().resolve_neg()))
    return values.flatten(-2) if tensor.is_complex() and tensor.dim() else values


def width_of(values: Tensor) -> int:
    """The number of columns: places of the last dimension, 1 for a scalar."""
    return max(1, values.shape[-1]) if values.dim() else 1


def moments(values: Tensor) -> Moments:
    """The moments of `values`."""
    squares = total = largest = known = 0.0
    for _, block in _blocks(values):
        wide = block.to(torch.float64)
        finite = wide.isfinite()
        wide = wide.where(finite, 0.0)
        parts = torch.stack([wide.square().sum(), wide.sum(), wide.abs().amax(), finite.sum(dtype=torch.float64)]).tolist()
        squares, total, largest, known = squares + parts[0], total + parts[1], max(largest, parts[2]), known + parts[3]
    return Moments(squares**0.5, total / known if known else 0.0, largest, values.numel() - int(known))


def bits(values: Tensor) -> str:
    """A hash of the bits of `values`: another one where one bit is another one, or two elements have changed places."""
    found = torch.zeros((), dtype=torch.int64, device=values.device)
    for start, block in _blocks(values):
        raw = block.view(_INTEGERS[block.element_size()]).to(torch.int64)
        found += ((raw + 1) * (_mixed(start, block) | 1)).sum()
    return f"{int(found) & (2**64 - 1):016x}"


def sketch(values: Tensor) -> Tensor:
    """`BUCKETS` sums of the elements with random signs, in float64: of two tensors of one shape, the squared distance of their sketches is
    an unbiased estimate of theirs, mostly within a tenth."""
    found = torch.zeros(BUCKETS, dtype=torch.float64, device=values.device)
    for start, block in _blocks(values):
        signed = torch.zeros(-(-block.numel() // BUCKETS) * BUCKETS, dtype=torch.float64, device=values.device)
        wide = block.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        signed[: block.numel()] = wide * (1 - 2 * ((_mixed(start, block) >> 40) & 1))
        found += signed.view(-1, BUCKETS).sum(0)
    return found


def sampled_columns(width: int, kept: int) -> Tensor:
    """Which `kept` of `width` columns are a sample: the first ones of an order that `width` alone decides, so that of two samples the
    smaller one is a part of the larger."""
    return torch.argsort(_mix(torch.arange(width, device="cpu")), stable=True)[:kept]


def _blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _BLOCK):
        yield start, flat[start : start + _BLOCK].contiguous()


def _mixed(start: int, block: Tensor) -> Tensor:
    """A number for each element of the block that begins at `start`, that looks random: those of the first block, times the block's own."""
    first = _first_block(str(block.device))[: block.numel()]
    return first * (int(_mix(torch.tensor(start, device="cpu"))) | 1) if start else first


@functools.lru_cache(maxsize=2)
def _first_block(device: str) -> Tensor:
    return _mix(torch.arange(_BLOCK, device=device))


def _mix(numbers: Tensor) -> Tensor:
    """Other integers that look random, in 63 bits: the steps of splitmix64, in arithmetic that wraps and is the same everywhere."""
    mixed = (numbers + 1) * -7046029254386353131
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    return (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) & 0x7FFFFFFFFFFFFFFF
