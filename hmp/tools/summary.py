"""summary(): the module tree of a model, with the dtype that each layer computes in and what it saves for backward."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..core.casting import each_tensor
from ..core.observe import listen
from ..core.policy.policy import Policy
from .formatting import NOTHING, size
from .model_call import call, check_module, chosen_policy, policy_context
from .model_state import preserve_state
from .pages.page import Cell, Page, Result, Section, Table, Text, nbytes, number
from .record.recorder import record
from .saved_activations import SavedActivations


@dataclass(frozen=True)
class Layer:
    """A module of a model, and what one forward pass did in it.

    `path` in the model ("" for the model itself), its class, its depth, its own parameters without those of modules inside it (a tied one
    at the first layer that has it), and of the forward pass the shapes that it returned last, the dtypes that its own ops computed in, most
    calls first, and the bytes that they keep for backward: each storage once, at the first layer that keeps it, and parameters left out.
    `weight_bytes` of these are copies of weights in another dtype, the others are activations.
    """

    path: str
    kind: str
    depth: int
    parameters: int
    shapes: tuple[tuple[int, ...], ...] = ()
    computes: tuple[str, ...] = ()
    saved_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True, repr=False)
class Summary(Result):
    """The layers of a model in the order of the tree; str() is a table. `policy` is that of the forward pass, "" where none was made.

    Example:
        >>> hmp.summary(torch.nn.Linear(4, 2)).to_dict()["parameters"]
        10
    """

    layers: tuple[Layer, ...]
    policy: str = ""
    _totals = ("parameters", "saved_bytes", "weight_bytes")

    def __getitem__(self, path: str) -> Layer:
        return self._named(self.layers, path, "the path of a module", by="path")

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def saved_bytes(self) -> int:
        """Return what the forward pass keeps for backward: activations and copies of weights."""
        return sum(layer.saved_bytes for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Return what copies of weights are of that."""
        return sum(layer.weight_bytes for layer in self.layers)

    def _page(self) -> Page:
        rows = []
        for layer in self.layers:
            name = f"{'  ' * layer.depth}{layer.path.rpartition('.')[2]}"
            called = f"{name} ({layer.kind})" if layer.path else layer.kind
            shapes = ", ".join(str(list(shape)) for shape in layer.shapes)
            parameters = number(layer.parameters, f"{layer.parameters:,}" if layer.parameters else NOTHING)
            kept = nbytes(layer.saved_bytes - layer.weight_bytes), nbytes(layer.weight_bytes)
            rows.append([Cell(called), Cell(shapes), parameters, Cell(", ".join(layer.computes)), *kept])
        activations, weights = (size(each, none="0 B") for each in (self.saved_bytes - self.weight_bytes, self.weight_bytes))
        kept_in_all = f"Kept for backward: {activations} of activations, {weights} of copies of weights"
        unknown = "Without a batch, dtypes and what is kept for backward are not known"
        columns = ("layer", "output", ">parameters", "computes in", ">activations kept", ">weight copies kept")
        return Page(
            title="hmp summary",
            verdict=f"{self.parameters:,} parameters" + (f", policy {self.policy!r}" if self.policy else ""),
            opening=[Text(kept_in_all if self.policy else unknown)],
            sections=[Section("layers", "Layers", "", [Table(columns, rows, most=len(rows))])],
        )


def summary(model: torch.nn.Module, batch: Any = None, policy: Policy | str | Path | None = None) -> Summary:
    """Summarise the modules of a model: the dtype that each computes in and what it saves for backward, as a table to print.

    Torch, the model and the random state are as before; meanwhile the weights take their memory twice.

    Args:
        model: The module.
        batch: The arguments of one call: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
            Without it the model is not called, and the table has only parameters.
        policy: The policy of the call. Default: the one applied to the model, else the active one, else "autocast".

    Returns:
        The summary.

    Raises:
        HmpError: `model` isn't a module, or has lazy modules that were never called.

    Example:
        >>> hmp.summary(torch.nn.Linear(4, 2), torch.randn(3, 4), "autocast")[""].computes
        ('bfloat16',)
    """
    if batch is None:
        check_module(model, "summary()")
        return Summary(tuple(_layers(model)))
    return of_call(model, functools.partial(call, model, batch), policy)


def of_call(model: torch.nn.Module, call: Callable[[], object], policy: Policy | str | Path | None = None) -> Summary:
    """Return the summary of `model` with what `call`, which calls it, does in it."""
    check_module(model, "summary()")
    chosen = chosen_policy(model, policy)
    with preserve_state(model, model.parameters()):
        seen = _Seen(model)
        with policy_context(model, chosen, model), record() as report, listen(seen):
            output = call()  # holds the graph: what is to be packed is packed at the end
    del output
    computes: defaultdict[str | None, Counter[str]] = defaultdict(Counter)
    for row in report.rows:
        if row.compute:
            computes[seen.path_of(row.module)][row.compute] += row.calls
    kept, weights = seen.by_path(seen.by_module), seen.by_path(seen.weights_by_module)
    layers = (
        replace(
            layer,
            shapes=seen.shapes.get(layer.path, ()),
            computes=tuple(dtype for dtype, _ in computes[layer.path].most_common()),
            saved_bytes=kept[layer.path],
            weight_bytes=weights[layer.path],
        )
        for layer in _layers(model)
    )
    return Summary(tuple(layers), chosen.name)


class _Seen(SavedActivations):
    """What a forward pass shows of the model's modules: the shapes that they return, and what they keep."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__([*model.parameters(), *model.buffers()])
        self.shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._known = {type(model).__name__: "", **{path: path for path in self._paths.values() if path}}

    def path_of(self, place: str) -> str | None:
        """Return the path of the nearest module that the model holds, for a place as recordings say it; None outside the model."""
        while place and place not in self._known:
            place = place.rpartition(".")[0]
        return self._known.get(place)

    def by_path(self, nbytes: Counter[str]) -> Counter[str | None]:
        """Return the bytes of each of the model's modules."""
        found: Counter[str | None] = Counter()
        for place, each in nbytes.items():
            found[self.path_of(place)] += each
        return found

    def left(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool) -> None:
        """Note what a module returned."""
        path = self._paths.get(id(module))
        if path is not None and not raised:
            self.shapes[path] = tuple(tuple(tensor.shape) for tensor in each_tensor((output,)))


def _layers(model: torch.nn.Module) -> Iterator[Layer]:
    parameters = Counter[str]()
    for name, parameter in model.named_parameters():  # a tied one once
        parameters[name.rpartition(".")[0]] += parameter.numel()
    for path, module in model.named_modules():
        yield Layer(path, type(module).__name__, path.count(".") + 1 if path else 0, parameters[path])
