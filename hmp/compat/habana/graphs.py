"""`habana_frameworks.torch.hpu.graphs`: HPUGraph is torch's CUDA graph; functions that capture a model return it as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ... import HmpError
from .device_map import actual_device
from .no_ops import DOES_NOTHING, no_op

__all__ = ["HPUGraph", "ModuleCacher", "graph", "make_graphed_callables", "wrap_in_hpu_graph"]

_WHY = "the model runs op by op"


wrap_in_hpu_graph = no_op("wrap_in_hpu_graph", _WHY, lambda *args, **kwargs: args[0] if args else kwargs["module"])
make_graphed_callables = no_op("make_graphed_callables", _WHY, lambda first, *args, **kwargs: first)


class ModuleCacher:
    """Return a model as it is: `ModuleCacher(...)(model, ...)`.

    Args:
        *args: Habana's; have no effect.
        **kwargs: Habana's; have no effect.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> ModuleCacher(max_graphs=5)(model=model) is model
        True
    """

    here = DOES_NOTHING, _WHY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __call__ = staticmethod(no_op("ModuleCacher", _WHY, lambda *args, **kwargs: args[0] if args else kwargs["model"]))


class HPUGraph:
    """A step that runs once while it is captured, and again at each `replay()`: torch.cuda.CUDAGraph. Other devices have no graphs.

    Raises:
        HmpError: "hpu" is not mapped to CUDA.

    Example:
        >>> def repeat(step, times):
        ...     graph = torch.hpu.HPUGraph()
        ...     with torch.hpu.stream(torch.hpu.Stream()):
        ...         graph.capture_begin()
        ...         step()
        ...         graph.capture_end()
        ...     for _ in range(times):
        ...         graph.replay()
        ...     graph.reset()
        >>> with hmp.compat.habana.install("cpu"):
        ...     repeat(lambda: None, times=2)
        Traceback (most recent call last):
        hmp.errors.HmpError: HPUGraph: expected "hpu" to be mapped to CUDA, got cpu, which has no graphs; run the step itself instead
    """

    def __init__(self) -> None:
        here = actual_device()
        if here.type != "cuda":
            raise HmpError(f'HPUGraph: expected "hpu" to be mapped to CUDA, got {here}, which has no graphs; run the step itself instead')
        self.of_torch = torch.cuda.CUDAGraph()
        self._is_dry = False

    def capture_begin(self, dry_run: bool = False) -> None:
        """Begin the capture of what runs in the current stream, which must not be the default one.

        Args:
            dry_run: Whether `capture_end()` leaves the step to the first `replay()`.
        """
        self._is_dry = dry_run
        self.of_torch.capture_begin()

    def capture_end(self) -> None:
        """End the capture, and run the step."""
        self.of_torch.capture_end()
        if not self._is_dry:  # CUDA runs nothing in a capture: the results have no values yet
            self.replay()

    def replay(self, asynchronous: bool = False) -> None:
        """Run the captured kernels again, on the current values of their tensors.

        Args:
            asynchronous: Has no effect: kernels run in the current stream.
        """
        self.of_torch.replay()

    def reset(self) -> None:
        """Delete the captured step."""
        self.of_torch.reset()


@contextlib.contextmanager
def graph(hpu_graph: HPUGraph, stream: Any = None, *, dry_run: bool = False, **options: Any) -> Iterator[None]:
    """Capture a step: `with torch.hpu.graph(g): ...`.

    Args:
        hpu_graph: The graph to capture into.
        stream: The stream to run the step in; None is one of torch's own.
        dry_run: Whether the step is left to the first `replay()`.
        **options: Habana's; have no effect.

    Example:
        >>> def captured(step):
        ...     g = torch.hpu.HPUGraph()
        ...     with torch.hpu.graph(g):
        ...         step()
        ...     return g
    """
    with torch.cuda.graph(hpu_graph.of_torch, stream=stream):
        yield
    if not dry_run:
        hpu_graph.replay()
