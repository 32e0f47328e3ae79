"""What a call of a model saves for backward: autograd's graph of what it returned, read without a hook that would change the call."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ...core.casting import Tensor, each_tensor, has_values
from ...core.formatting import dtype_name
from ...core.observe import Listener, modules, nbytes_of
from ...core.torch_private import (
    graph_task,
    has_storage,
    in_plain_autograd,
    memory_of,
    packed,
    sequence_number,
    storage_of,
    without_torch_function,
)

Marks = list[tuple[int, str]]  # from which of autograd's nodes on which module, by its path, runs


Checkpointed = list[tuple[str, object, int]]  # what checkpoints keep: the module that ran, what identifies the memory, its bytes


def kept_for_backward(module: torch.nn.Module, output: Any, marks: Marks, checkpointed: Checkpointed) -> dict[str, int] | None:
    """Return the bytes that a call of `module` keeps, by the path of the module that ran; None where autograd recorded nothing of it.

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
        for path, storage, nbytes in checkpointed:
            if storage not in counted:
                counted.add(storage)
                kept[path] += nbytes
    return {path: nbytes for path, nbytes in kept.items() if nbytes} if nodes else None


def _nodes(output: Any, first: int) -> set[Any]:
    """Return the nodes, from the one numbered `first` on, that backward would run for what a call returned."""
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
    """Return the node that the tensor comes from; None without one, or if torch refuses it: a view whose base was written since."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _saved(node: Any, names: list[str]) -> Iterator[Any]:
    """Yield what the node saved, or what a hook of the user's made of it: the hook that would give it back is not called."""
    for name in names:
        try:
            values = getattr(node, name)
        except RuntimeError:  # backward has run and freed them
            continue
        for each in values if isinstance(values, tuple) else (values,):
            yield each.data


def _storage(tensor: Tensor) -> tuple[object, int]:
    """Return what identifies the tensor's memory, and its bytes."""
    if has_values(tensor) and has_storage(tensor):
        storage = storage_of(tensor)
        return memory_of(storage), storage.nbytes()
    return ("of no storage", id(tensor)), nbytes_of(tensor)


@dataclass(frozen=True)
class Model:
    """An outermost module with parameters that was called.

    The name of its class, `count` of them with such parameters, and of one the numbers of its parameters by dtype, of those to be trained,
    and their bytes.

    `kept` are the bytes that its first call that autograd recorded saves for backward, by the path of the module that ran: each storage
    once, at the first module that keeps it, parameters and buffers left out, copies of them in a low-precision dtype not. Of a checkpoint
    its inputs count. None without such a call, or if torch does not show it. What other hooks for saved tensors keep themselves, C++
    extensions, and changes in place of views is not seen.
    """

    name: str
    parameters: dict[str, int]
    trainable: int
    parameter_bytes: int
    kept: dict[str, int] | None = None
    count: int = 1

    @property
    def size(self) -> int:
        """Return the number of its parameters."""
        return sum(self.parameters.values())

    @property
    def dtypes(self) -> str:
        """Return the dtypes of its parameters, with how many are of which where there are several."""
        parts = self.parameters.items()
        return ", ".join(f"{number:,} {dtype}" for dtype, number in parts) if len(parts) > 1 else "".join(self.parameters)

    @property
    def kept_bytes(self) -> int:
        """Return what a call of it keeps, in all its modules."""
        return sum((self.kept or {}).values())


@dataclass(frozen=True)
class Share:
    """Bytes kept in a module, or in `modules` whose paths differ in numbers alone, which are `*` in `path`."""

    path: str
    modules: int
    bytes: int


def shares(kept: Mapping[str, int]) -> list[Share]:
    """Return what a call keeps by module, layers that are repeated taken together, most bytes first."""
    found: dict[str, list[str]] = {}
    for path in kept:
        found.setdefault(pattern(path), []).append(path)
    made = [Share(same if len(paths) > 1 else paths[0], len(paths), sum(map(kept.__getitem__, paths))) for same, paths in found.items()]
    return sorted(made, key=lambda share: -share.bytes)


def pattern(path: str) -> str:
    """Return the path of a module with `*` for its numbers, by which it is known as one of several layers.

    Of one that is only numbered itself.
    """
    parts = path.split(".")
    return path if all(map(str.isdecimal, parts)) else ".".join("*" if part.isdecimal() else part for part in parts)


def merge_models(models: Iterable[Model]) -> list[Model]:
    """Return the models of several recordings: those of one class with the same parameters are the same ones."""
    found: list[Model] = []
    for model in models:
        for at, known in enumerate(found):
            if _are_alike(known, model):
                kept = model.kept if known.kept is None else known.kept
                found[at] = replace(known, kept=kept, count=max(known.count, model.count))
                break
        else:
            found.append(model)
    return found


def _are_alike(one: Model, other: Model) -> bool:
    return replace(one, kept=None, count=1) == replace(other, kept=None, count=1)


class RunningModels(Listener):
    """The running modules, which are looked at where they are outermost ones: once, and without keeping them alive."""

    def __init__(self) -> None:
        self.found: list[Model] = []
        self._followed = threading.local()
        # the place of each outermost module in `found`, -1 without parameters
        self._places: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def entered(self, module: torch.nn.Module) -> None:
        """Begin to follow the call of an outermost module, and note where each other one begins."""
        if modules.around is None:
            self._followed.marks = [] if self._is_to_be_followed(module) else None
            self._followed.checkpointed = []
        self._mark(modules.path)

    def left(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool) -> None:
        """Note where a module ends, and of an outermost one what the call saves for backward."""
        around = modules.around
        if around is not None:
            self._mark(around)
            return
        marks, self._followed.marks = getattr(self._followed, "marks", None), None
        # of a checkpoint's recomputation, in backward, a part of the model is the outermost
        if module not in self._places and graph_task() < 0:
            self._places[module] = self._place_of(module)
        if marks:
            place = self._places.get(module, -1)
            kept = kept_for_backward(module, output, marks, self._followed.checkpointed)
            if place >= 0 and kept is not None and self.found[place].kept is None:
                self.found[place] = replace(self.found[place], kept=kept)

    def checkpointed(self, inputs: Sequence[Tensor]) -> None:
        """Note what a checkpoint keeps."""
        if getattr(self._followed, "marks", None) is not None:
            kept = [each for each in inputs if not (each.is_leaf and each.requires_grad)]
            self._followed.checkpointed += [(modules.path, *_storage(each)) for each in kept]

    def _mark(self, path: str) -> None:
        marks: Marks | None = getattr(self._followed, "marks", None)
        if marks is not None:
            marks.append((sequence_number(), path))

    def _is_to_be_followed(self, module: torch.nn.Module) -> bool:
        """Return True if the call may be the first one of the model that autograd records."""
        if packed is None or not torch.is_grad_enabled() or graph_task() >= 0 or not in_plain_autograd():
            return False
        place = self._places.get(module)
        return place is None or (place >= 0 and self.found[place].kept is None)

    def _place_of(self, module: torch.nn.Module) -> int:
        parameters = [each for each in module.parameters() if not is_lazy(each)]
        if not parameters:
            return -1
        sizes: Counter[str] = Counter()
        for each in parameters:
            sizes[dtype_name(each.dtype)] += each.numel()
        trainable = sum(each.numel() for each in parameters if each.requires_grad)
        found = Model(module._get_name(), dict(sizes), trainable, sum(each.numel() * each.element_size() for each in parameters))
        for place, known in enumerate(self.found):
            if _are_alike(known, found):
                self.found[place] = replace(known, count=known.count + 1)
                return place
        self.found.append(found)
        return len(self.found) - 1
