"""What a call of a model keeps for backward: autograd's graph of what it returned, read without a hook that would change the call."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from ...core.casting import Tensor, each_tensor, has_values
from ...core.observe import nbytes_of
from ...core.torch_private import has_storage, memory_of, storage_of, without_torch_function

Marks = list[tuple[int, str]]  # from which of autograd's nodes on which module, by its path, runs


def kept_for_backward(module: torch.nn.Module, output: Any, marks: Marks) -> dict[str, int] | None:
    """The bytes that a call of `module` keeps, by the path of the module that ran; None where autograd recorded nothing of it.

    Each storage counts once, for the first module that keeps it; those of parameters and buffers do not.
    """
    starts = [start for start, _ in marks]
    names: dict[type, list[str]] = {}
    with without_torch_function():
        nodes = sorted(_nodes(output, starts[0]), key=_number)
        counted: set[object] = {_storage(tensor)[0] for tensor in (*module.parameters(), *module.buffers())}
        kept: Counter[str] = Counter()
        for node in nodes:
            path = marks[bisect_right(starts, _number(node)) - 1][1]
            kind = type(node)
            if kind not in names:
                names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
            for tensor in each_tensor(_saved(node, names[kind])):
                storage, nbytes = _storage(tensor)
                if storage not in counted and not (tensor.is_leaf and tensor.requires_grad):
                    counted.add(storage)
                    kept[path] += nbytes
    return {path: nbytes for path, nbytes in kept.items() if nbytes} if nodes else None


def _nodes(output: Any, first: int) -> set[Any]:
    """The nodes, from the one numbered `first` on, that backward would run for what a call returned."""
    found: set[Any] = set()
    # tensors may also be the attributes of an object that was returned
    todo = [_made_by(tensor) for tensor in each_tensor((output, getattr(output, "__dict__", {})))]
    while todo:
        node = todo.pop()
        if node is not None and node not in found and _number(node) >= first:
            found.add(node)
            todo += [each for each, _ in node.next_functions]
    return found


def _made_by(tensor: Tensor) -> Any:
    """The node that the tensor comes from; None where there is none, or where torch refuses it: a view whose base was written since."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _saved(node: Any, names: list[str]) -> Iterator[Any]:
    """What the node saved, or what a hook of the user's made of it: the hook that would give it back is not called."""
    for name in names:
        try:
            values = getattr(node, name)
        except RuntimeError:  # backward has run and freed them
            continue
        for each in values if isinstance(values, tuple) else (values,):
            yield each.data


def _storage(tensor: Tensor) -> tuple[object, int]:
    """What tells the tensor's memory from others, and its bytes."""
    if has_values(tensor) and has_storage(tensor):
        storage = storage_of(tensor)
        return memory_of(storage), storage.nbytes()
    return ("of no storage", id(tensor)), nbytes_of(tensor)
