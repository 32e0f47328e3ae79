"""The values of one run beside those of another: what the first one made is kept as samples, and the other's are set beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from ..casting import each_tensor
from .aten import local
from .distance import as_real, error_and_size, held, ratio, widened

Tensor = torch.Tensor
Key = tuple[str, ...]
# Elements that are kept of an op's or a module's result, and of an output or a gradient: all that there are, up to so many.
OF_RESULTS, OF_WHOLES = 2**10, 2**16
_GOLDEN = (math.sqrt(5) - 1) / 2


class Values:
    """The values of a run. Without `first` it keeps samples; with it, the values of another run, it tells how far they are from those.

    A sample is the tensor itself up to `most` elements, else as many of it at places that follow the golden ratio: spread evenly, the
    same in every run, and in step with no dimension of the tensor.
    """

    def __init__(self, first: Values | None = None) -> None:
        self._first = first
        self._kept: dict[Key, list[Tensor]] = {}
        self._places: dict[tuple[int, int, torch.device], Tensor] = {} if first is None else first._places
        self._found: dict[Key, list[tuple[float, float] | None]] = {}  # error and size of each, None where the first run has no such

    def add_all(self, key: Key, results: object, reference: Callable[[Tensor], Tensor], most: int = OF_RESULTS) -> None:
        """Adds each tensor of `results`; `reference(tensor)` is what float32 has in its place."""
        for tensor in map(local, each_tensor((results,))):
            if tensor.is_floating_point() or tensor.is_complex():
                self.add(key, tensor, reference(tensor), most)

    def add(self, key: Key, tensor: Tensor, reference: Tensor, most: int = OF_RESULTS) -> None:
        """One more tensor of that key, in the order in which the run makes them."""
        tensor, reference = held(tensor), held(reference)
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return
        sample = self._sample(tensor, most)
        if self._first is None:
            self._kept.setdefault(key, []).append(sample)
            return
        found = self._found.setdefault(key, [])
        kept = self._first._kept.get(key, ())
        if len(found) >= len(kept) or kept[len(found)].shape != sample.shape:
            found.append(None)
            return
        error, size, _ = error_and_size(sample, self._sample(reference, most), kept[len(found)])
        each = math.sqrt(as_real(tensor).numel() / sample.numel())
        found.append((each * error, each * size))

    def largest(self, keys: Iterable[Key]) -> float | None:
        """The largest distance, relative to float32's values, of a tensor of these keys; None where the runs made other tensors."""
        pairs = [pair for key in keys for pair in self._pairs(key) or ()]
        return max((ratio(*pair) for pair in pairs), default=None)

    def together(self, keys: Iterable[Key]) -> float | None:
        """The distance of all tensors of these keys as one vector; None where the runs made other tensors."""
        found = [self._pairs(key) for key in keys]
        pairs = [pair for each in found for pair in each or ()]
        if not pairs or any(each is None for each in found):
            return None
        error, size = (math.sqrt(sum(pair[at] ** 2 for pair in pairs)) for at in (0, 1))
        return ratio(error, size)

    def keys(self, kind: str) -> list[Key]:
        """Of all tensors of this kind, this run's and the first one's."""
        first = self._first.keys(kind) if self._first is not None else []
        return sorted({key for key in (*self._found, *self._kept, *first) if key[0] == kind})

    def _pairs(self, key: Key) -> list[tuple[float, float]] | None:
        found = self._found.get(key, [])
        pairs = [pair for pair in found if pair is not None]
        assert self._first is not None
        return pairs if len(pairs) == len(found) == len(self._first._kept.get(key, ())) else None

    def _sample(self, tensor: Tensor, most: int) -> Tensor:
        tensor = as_real(widened(tensor)).detach()
        count = tensor.numel()
        if count <= most:
            return tensor.reshape(-1).clone()
        where = count, most, tensor.device
        if where not in self._places:
            turns = torch.arange(most, dtype=torch.float64) * _GOLDEN
            self._places[where] = (turns.frac() * count).long().to(tensor.device)
        return tensor.take(self._places[where])
