"""Who is told of what is kept, and of what packing it took and saved: a recording."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from .formats import Format, Tensor, pack, unpack

now = time.perf_counter
_LOOKED_AT = 2**16

# torch's own, taken before anything is patched
_double, _item, _narrow, _numel = Tensor.double, Tensor.item, Tensor.narrow, Tensor.numel
_nan_to_num, _square, _sub, _sum = torch.nan_to_num, torch.square, torch.sub, torch.sum


class Watcher(Protocol):
    """Is told of what ops keep for backward under a policy that has it packed."""

    def kept(self, op: str, tensor: Tensor, nbytes: int, left: int) -> Any:
        """Called when an op keeps `nbytes`, those of `tensor` or of all its memory, of which `left` stay for now. What it returns is given
        to `changed`."""

    def changed(self, about: Any, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Called when that was packed or unpacked: by how many bytes less is kept, how long it took, and where it was packed for each
        piece two sums of squares, of what packing changed and of the numbers."""


watchers: list[Watcher] = []
About = list[tuple[Watcher, Any]]


def kept(op: str, tensor: Tensor, nbytes: int, left: int) -> About:
    """Tells all watchers; gives what `changed` takes."""
    return [(watcher, watcher.kept(op, tensor, nbytes, left)) for watcher in watchers]


def changed(about: About, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
    """Tells those that were told of the keeping."""
    for watcher, each in about:
        watcher.changed(each, saved, seconds, errors)


def error_of(flat: Tensor, form: Format, row: int, signs: bool) -> tuple[float, float]:
    """The sums of squares of what packing changes, and of the finite numbers, of the first elements: of all it would take too long. Bits
    change nothing that backward asks for."""
    some = _narrow(flat, 0, 0, min(_numel(flat), max(_LOOKED_AT // row, 1) * row))
    exact = _nan_to_num(_double(some), 0.0, 0.0, 0.0)
    found = exact if form.is_bits else _nan_to_num(_double(unpack(pack(some, form, row, signs))), 0.0, 0.0, 0.0)
    return float(_item(_sum(_square(_sub(found, exact))))), float(_item(_sum(_square(exact))))
