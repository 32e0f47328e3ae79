"""When a cast made before may be used again: what wrappers call in the place of a plain cast, and what users ask and set."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..casting import Tensor, cast
from ..errors import HmpError
from . import activation_cache, weight_cache, write_marks
from .activation_cache import low_activation
from .weight_cache import low_weight

for _reader in (cast, low_weight, low_activation):
    write_marks.reads_only(_reader.__code__)

Parameter = torch.nn.Parameter


class CacheInfo(NamedTuple):
    """What the caches hold: copies of weights, their bytes, the most that they may hold; how often a cast was or was not saved; and how
    often no copy of a weight could be kept, by reason.

    The reasons: "device" (only the CPU's memory can be marked), "foreign memory" (numpy's, a file's, another process's), "held elsewhere"
    (a view, a capsule or a graph holds it), "process group" (one is initialised, and may write), "other threads" (one was inside a call)
    and "limit".
    """

    entries: int
    bytes: int
    limit: int
    hits: int
    misses: int
    refused: dict[str, int]


def cast_product_input(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, for an op whose result never shares memory with its inputs; a copy made before where it is still right."""
    kind = type(tensor)
    if kind is Parameter:
        return low_weight(tensor, dtype)
    return low_activation(tensor, dtype) if kind is Tensor else cast(tensor, dtype)


def cast_weights(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `cast_product_input`, for an op whose result may share memory with inputs that are no weights."""
    return cast_product_input(tensor, dtype) if type(tensor) is Parameter else cast(tensor, dtype)


def clear_cache() -> None:
    """Drops every copy of a weight or an activation that was kept to be used again; the memory is free when nobody else uses it."""
    weight_cache.clear()
    activation_cache.clear()


def revert() -> None:
    """As if nothing had ever been cast."""
    clear_cache()
    weight_cache.hits = weight_cache.misses = activation_cache.hits = activation_cache.misses = 0
    weight_cache.refused.clear()


def hits() -> int:
    """How many casts were saved since torch was last untouched."""
    return weight_cache.hits + activation_cache.hits


def cache_info() -> CacheInfo:
    """Entries, bytes, limit, hits, misses and refusals of the cast caches since torch was last untouched."""
    misses = weight_cache.misses + activation_cache.misses
    return CacheInfo(weight_cache.entries(), weight_cache.bytes_kept(), weight_cache.limit(), hits(), misses, dict(weight_cache.refused))


def set_cache_limit(limit: int | None) -> None:
    """At most so many bytes of copies of weights are kept; 0 keeps none, None is the default: a quarter of the machine's memory.

    A float32 weight's copy is half its size, so with copies of all weights a model takes 1.5 times its weights. By default that is so
    for models that fill up to half of the memory; of larger ones the rest is cast at each use.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise HmpError(f"set_cache_limit() takes a number of bytes, 0 or more, or None for the default; got {limit!r}")
    weight_cache.set_limit(limit)
