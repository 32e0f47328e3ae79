"""The casts that wrappers call instead of a plain cast, answered from a cache where possible, and hmp's public cache functions."""

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
    """The cached casts of weights on one device.

    Attributes:
        entries: The number of casts.
        bytes: Their memory.
        limit: The most bytes allowed.
        refused: How often a cast could not be kept, by reason (see CacheInfo).
    """

    entries: int
    bytes: int
    limit: int
    refused: dict[str, int]


class CacheInfo(NamedTuple):
    """The state of the cast caches.

    The reasons in `refused`: "device" (writes to its memory cannot be watched: it was tried), "captured graph" (replays of a captured graph
    write unseen), "foreign memory" (numpy's, a file's, another process's), "held elsewhere" (a view, a dlpack capsule or a graph holds the
    memory, too), "process group" (one is initialised, and its threads may write), "other threads" (one was inside a call that may write)
    and "limit" (`hmp.set_cache_limit()`).

    Attributes:
        entries: The number of cached casts of weights, on all devices.
        bytes: Their memory.
        limit: The most bytes allowed on the CPU.
        hits: The casts of weights and activations that the caches saved.
        misses: The casts that they could have saved.
        refused: How often a weight's cast could not be kept, by reason.
        devices: The numbers of each device, by its name.
    """

    entries: int
    bytes: int
    limit: int
    hits: int
    misses: int
    refused: dict[str, int]
    devices: dict[str, DeviceCache]


def cast_product_input(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`, from a cache where possible. For an op whose result never shares memory with its inputs."""
    kind = type(tensor)
    if kind is Parameter:
        return low_weight(tensor, dtype)
    return low_activation(tensor, dtype) if kind is Tensor else cast(tensor, dtype)


def cast_weights(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`, from a cache where it is a Parameter: for an op whose result may share memory with its other inputs."""
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
    """Delete every cached cast of a weight or an activation. Its memory is freed once no graph or running op uses it.

    Example:
        >>> hmp.clear_cache()
        >>> hmp.cache_info().entries
        0
    """
    weight_cache.clear()
    activation_cache.clear()


def revert() -> None:
    """Empty the caches and set the counts of cache_info() to 0; the limit stays."""
    clear_cache()
    shared_cast.forget_hits()
    weight_cache.misses = activation_cache.misses = 0
    weight_cache.refused.clear()


def cache_info() -> CacheInfo:
    """Return the state of the cast caches, with the counts since hmp patched torch.

    Returns:
        Entries, bytes, hits, misses and the reasons for which casts were not kept. `hmp.revert()` sets the counts to 0.

    Example:
        >>> hmp.clear_cache()
        >>> hmp.cache_info().bytes
        0
    """
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
    """Limit the memory of cached casts of weights. A weight whose cast does not fit is cast at each use.

    The bfloat16 cast of a float32 weight has half its size, so a model with casts of all weights takes 1.5 times the memory of its weights.
    The default allows that for models that fill up to half of the memory.

    Args:
        limit: The most bytes on each device; 0 keeps none, None is the default, a quarter of the device's memory.

    Raises:
        HmpError: `limit` is not None and not an integer >= 0.

    Example:
        >>> hmp.set_cache_limit(0)
        >>> hmp.cache_info().limit
        0
        >>> hmp.set_cache_limit(None)
    """
    _check_bytes("set_cache_limit", limit)
    weight_cache.set_limit(limit)


def set_sharing(least: int | None) -> None:
    """Set from which size on matrix products share the cast of a tensor that requires a gradient.

    A tensor that several products take, such as the input of query, key and value, is then cast once and saved once for backward. Each use
    of an activation adds a node to autograd's graph, which takes longer than the cast of a tensor of 128 KiB on a CPU: a larger value saves
    time if activations are small, 0 saves the most memory. Results have the same bits, and gradients are summed in the tensor's own dtype
    as without sharing.

    Args:
        least: The size in bytes; None is the default, 32 KiB for activations and 0 for weights.

    Raises:
        HmpError: `least` is not None and not an integer >= 0.

    Example:
        >>> hmp.set_sharing(0)
        >>> hmp.set_sharing(None)
    """
    _check_bytes("set_sharing", least)
    shared_cast.least = shared_cast.DEFAULT_LEAST if least is None else least
    shared_cast.least_weight = shared_cast.DEFAULT_LEAST_WEIGHT if least is None else least


def _check_bytes(function: str, value: object) -> None:
    """Raise HmpError unless `value`, an argument of `function`, is a number of bytes or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise HmpError(f"{function}() expected a number of bytes >= 0, or None for the default, got {value!r}")
