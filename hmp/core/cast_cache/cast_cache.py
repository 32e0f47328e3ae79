"""The casts that wrappers call in the place of a plain cast, answered from a cache where possible, and hmp's public cache functions."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from ...errors import HmpError
from ..casting import Tensor, cast
from . import activation_cache, shared_cast, weight_cache, write_marks
from .activation_cache import low_activation as low_activation
from .weight_cache import low_weight as low_weight

for _reader in (cast, low_weight, low_activation, shared_cast.count_hit):
    write_marks.reads_only(_reader.__code__)

Parameter = torch.nn.Parameter
# torch's own, taken before anything is patched
_grad_enabled = torch.is_grad_enabled
_detach = Tensor.detach


class DeviceCache(NamedTuple):
    """Of one device: how many copies of weights are kept, their bytes, the most bytes allowed, and by reason how often none was kept."""

    entries: int
    bytes: int
    limit: int
    refused: dict[str, int]


class CacheInfo(NamedTuple):
    """The state of the cast caches. `entries` and `bytes` are of copies of weights, on all devices; `limit` is the most bytes allowed on
    the CPU. `hits` and `misses` count the casts of weights and activations that a copy saved, and those that a copy could have saved.
    `refused` counts by reason the times that a weight's copy could not be kept. `devices` tells each device's part by its name.

    The reasons: "device" (its memory cannot be watched for writes: it was tried), "captured graph" (one was captured, whose replays write
    unseen), "foreign memory" (numpy's, a file's, another process's), "held elsewhere" (a view, a dlpack capsule or a graph holds the memory
    too), "process group" (one is initialised, and its threads may write), "other threads" (one was inside a call that may write) and
    "limit" (set_cache_limit()).
    """

    entries: int
    bytes: int
    limit: int
    hits: int
    misses: int
    refused: dict[str, int]
    devices: dict[str, DeviceCache]


def cast_product_input(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, from a cache where possible. For an op whose result never shares memory with its inputs."""
    kind = type(tensor)
    if kind is Parameter:
        return low_weight(tensor, dtype)
    return low_activation(tensor, dtype) if kind is Tensor else cast(tensor, dtype)


def cast_weights(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, from a cache where it is a Parameter: for an op whose result may share memory with its other inputs."""
    return low_weight(tensor, dtype) if type(tensor) is Parameter else cast(tensor, dtype)


def cast_recurrent(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `cast_weights`, for an op that uses its weights at every step: the gradients of the steps are summed in float32 (R21)."""
    plain = (type(tensor) is Parameter or type(tensor) is Tensor) and tensor.dtype is torch.float32 and tensor.layout is torch.strided
    if not (plain and _grad_enabled() and tensor.requires_grad and shared_cast.can_make_nodes()):
        return cast_weights(tensor, dtype)
    if id(tensor) in weight_cache.used_once:  # no other call uses it between two writes: there is no copy to be found
        return shared_cast.node_of(tensor, cast(_detach(tensor), dtype))
    low = cast_weights(tensor, dtype)
    return low if weight_cache.is_node(low, tensor) else shared_cast.node_of(tensor, _detach(low))


def clear_cache() -> None:
    """Drops every cached copy of a weight or an activation. Its memory is freed once no graph or running op uses it."""
    weight_cache.clear()
    activation_cache.clear()


def revert() -> None:
    """Empties the caches and sets the counts of cache_info() to 0; the limit stays."""
    clear_cache()
    shared_cast.forget_hits()
    weight_cache.misses = activation_cache.misses = 0
    weight_cache.refused.clear()


def cache_info() -> CacheInfo:
    """The state of the cast caches, with the counts since hmp patched torch (revert() sets them to 0)."""
    misses = weight_cache.misses + activation_cache.misses
    entries, refused = weight_cache.entries(), weight_cache.refused.copy()
    names = sorted({str(device) for device, _ in entries} | {name for name, _ in refused})
    devices = {name: _of_device(torch.device(name), entries, refused) for name in names}
    reasons: Counter[str] = Counter()
    for (_, reason), count in refused.items():
        reasons[reason] += count
    limit = weight_cache.limit(torch.device("cpu"))
    return CacheInfo(len(entries), sum(n for _, n in entries), limit, shared_cast.hits(), misses, dict(reasons), devices)


def _of_device(device: torch.device, entries: list[tuple[torch.device, int]], refused: Counter[tuple[str, str]]) -> DeviceCache:
    sizes = [nbytes for of, nbytes in entries if of == device]
    reasons = {reason: count for (name, reason), count in refused.items() if name == str(device)}
    return DeviceCache(len(sizes), sum(sizes), weight_cache.limit(device), reasons)


def set_cache_limit(limit: int | None) -> None:
    """Lets cached copies of weights take at most `limit` bytes of each device. 0 keeps none; None is the default, a quarter of its memory.

    The copy of a float32 weight has half its size, so a model with copies of all weights takes 1.5 times its weights. The default allows
    that for models that fill up to half of the memory; what does not fit is cast at each use. Raises HmpError for any other limit.
    """
    _check_bytes("set_cache_limit", limit)
    weight_cache.set_limit(limit)


def set_sharing(least: int | None) -> None:
    """Lets products share the cast of a tensor that needs a gradient and has at least `least` bytes. None is the default: 32 KiB for
    activations, 0 for weights.

    What several products take, such as the input of query, key and value, is then cast once and kept once for backward. Each use of an
    activation costs a node of autograd's graph, which takes longer than the cast of a tensor of 128 KiB does on a CPU. So a greater value
    saves time where activations are small, 0 the most memory. Results are the same bits, and gradients are summed in the tensor's own dtype
    as if each use had cast anew. Raises HmpError for any other value.
    """
    _check_bytes("set_sharing", least)
    shared_cast.least = shared_cast.DEFAULT_LEAST if least is None else least
    shared_cast.least_weight = shared_cast.DEFAULT_LEAST_WEIGHT if least is None else least


def _check_bytes(function: str, value: object) -> None:
    """Raises HmpError unless `value`, an argument of `function`, is a number of bytes or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise HmpError(f"{function}() takes a number of bytes, 0 or more, or None for the default; got {value!r}")
