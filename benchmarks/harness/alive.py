"""The bytes alive at the end of forward, counted without hmp's help: each memory once, from torch's graph and Python's objects."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Tensor = torch.Tensor


def bytes_alive(forward: Callable[[], Tensor], own: Iterable[Tensor]) -> int:
    """Return the bytes that `forward()`, which returns a loss, leaves alive: in the graph and in Python's tensors, without `own`."""
    gc.collect()
    before = [*own, *_of_python()]  # referenced, so that no other memory gets their address
    skipped = {memory for memory, _ in _memories(before)}
    gc.freeze()  # a million objects that need no second look
    try:
        loss = forward()
        found = dict(_memories(_of_python())) | dict(_memories(_of_graph(loss)))
    finally:
        gc.unfreeze()
    return sum(nbytes for memory, nbytes in found.items() if memory not in skipped)


def _memories(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            yield storage._cdata, storage.nbytes()


def _of_python() -> list[Tensor]:
    return [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]


def _of_graph(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that the graph's nodes hold as they are; what a hook made of others is Python's."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                values = getattr(node, name)
                kept = [each.data for each in (values if isinstance(values, (tuple, list)) else (values,))]
                yield from (each for each in kept if isinstance(each, Tensor))
