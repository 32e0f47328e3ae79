"""summary(): the module tree of a model, with the dtype that each layer computes in and what it saves for backward."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.casting import each_tensor
from ..core.observe import listen
from ..core.policy.policy import Policy
from .formatting import NOTHING, size
from .model_call import call, check_module, chosen_policy, policy_context
from .model_state import preserve_state
from .pages.page import Cell, Page, Result, Section, Table, nbytes, number
from .record.recorder import record
from .saved_activations import SavedActivations


@dataclass(frozen=True)
class Layer:
    """A module of a model, and what one forward pass did in it.

    `path` in the model ("" for the model itself), its class, its depth, its own parameters without those of modules inside it, and of the
    forward pass the shapes that it returned last, the dtypes that its own ops computed in, most calls first, and the bytes that they save
    for backward: each storage once, at the first layer that keeps it, and parameters left out.
    """

    path: str
    kind: str
    depth: int
    parameters: int
    shapes: tuple[tuple[int, ...], ...] = ()
    computes: tuple[str, ...] = ()
    saved_bytes: int = 0


@dataclass(frozen=True, repr=False)
class Summary(Result):
    """The layers of a model in the order of the tree; str() is a table. `policy` is that of the forward pass, "" where none was made.

    Example:
        >>> hmp.summary(torch.nn.Linear(4, 2)).to_dict()["parameters"]
        10
    """

    layers: tuple[Layer, ...]
    policy: str = ""
    _totals = ("parameters", "saved_bytes")

    def __getitem__(self, path: str) -> Layer:
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise KeyError(f"no module {path!r}; there are {', '.join(repr(layer.path) for layer in self.layers)}")

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def saved_bytes(self) -> int:
        """Return what the forward pass saves for backward."""
        return sum(layer.saved_bytes for layer in self.layers)

    def _page(self) -> Page:
        rows = []
        for layer in self.layers:
            name = f"{'  ' * layer.depth}{layer.path.rpartition('.')[2]}"
            called = f"{name} ({layer.kind})" if layer.path else layer.kind
            shapes = ", ".join(str(list(shape)) for shape in layer.shapes)
            parameters = number(layer.parameters, f"{layer.parameters:,}" if layer.parameters else NOTHING)
            rows.append([Cell(called), Cell(shapes), parameters, Cell(", ".join(layer.computes)), nbytes(layer.saved_bytes)])
        under = f"under policy {self.policy!r}" if self.policy else "without a batch, dtypes and what is saved are not known"
        table = Table(("layer", "output", ">parameters", "computes in", ">saves"), rows, most=len(rows))
        return Page(
            title="hmp summary",
            verdict=f"{self.parameters:,} parameters, {size(self.saved_bytes, none='0 B')} saved for backward, {under}",
            sections=[Section("layers", "Layers", "", [table])],
        )


def summary(model: torch.nn.Module, batch: Any = None, policy: Policy | str | Path | None = None) -> Summary:
    """Summarise the modules of a model: the dtype that each computes in and what it saves for backward, as a table to print.

    Model and random state are as before.

    Args:
        model: The module.
        batch: The arguments of one call: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
            Without it the model is not called, and the table has only parameters.
        policy: The policy of the call. Default: the one applied to the model, else the active one, else "autocast".

    Returns:
        The summary.

    Raises:
        HmpError: `model` isn't a module.

    Example:
        >>> hmp.summary(torch.nn.Linear(4, 2), torch.randn(3, 4), "autocast")[""].computes
        ('bfloat16',)
    """
    if batch is None:
        check_module(model, "summary()")
        return Summary(tuple(_layers(model, {}, {}, {})))
    return of_call(model, functools.partial(call, model, batch), policy)


def of_call(model: torch.nn.Module, call: Callable[[], object], policy: Policy | str | Path | None = None) -> Summary:
    """Return the summary of `model` with what `call`, which calls it, does in it."""
    check_module(model, "summary()")
    chosen = chosen_policy(model, policy)
    seen = _Seen(model)
    with preserve_state(model, model.parameters()), policy_context(model, chosen, model), record() as report, listen(seen):
        output = call()  # holds the graph: what is to be packed is packed at the end
    del output
    computes: dict[str, Counter[str]] = {}
    for row in report.rows:
        path = seen.path_of(row.module)
        if path is not None and row.compute:
            computes.setdefault(path, Counter())[row.compute] += row.calls
    saved: Counter[str] = Counter()
    for place, kept in seen.by_module.items():
        path = seen.path_of(place)
        if path is not None:
            saved[path] += kept
    return Summary(tuple(_layers(model, seen.shapes, computes, saved)), chosen.name)


class _Seen(SavedActivations):
    """What a forward pass shows of the model's modules: the shapes that they return, and what they save."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__([*model.parameters(), *model.buffers()])
        self.shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}

    def path_of(self, place: str) -> str | None:
        """Return the path in the model of a place as recordings say it.

        Of the nearest module that the model holds, None outside the model.
        """
        name = type(self._model).__name__
        known = set(self._paths.values())
        while place:
            if place == name:
                return ""
            if place in known:
                return place
            place = place.rpartition(".")[0]
        return None

    def left(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, raised: bool) -> None:
        """Note what a module returned."""
        path = self._paths.get(id(module))
        if path is not None and not raised:
            self.shapes[path] = tuple(tuple(tensor.shape) for tensor in each_tensor((output,)))


def _layers(
    model: torch.nn.Module,
    shapes: Mapping[str, tuple[tuple[int, ...], ...]],
    computes: Mapping[str, Counter[str]],
    saved: Mapping[str, int],
) -> Iterator[Layer]:
    for path, module in model.named_modules():
        yield Layer(
            path=path,
            kind=type(module).__name__,
            depth=path.count(".") + 1 if path else 0,
            parameters=sum(parameter.numel() for parameter in module.parameters(recurse=False)),
            shapes=shapes.get(path, ()),
            computes=tuple(dtype for dtype, _ in computes.get(path, Counter()).most_common()),
            saved_bytes=saved.get(path, 0),
        )
