"""`habana_frameworks.torch.hpu.graphs`: HPUGraph captures a step and replays it; functions that capture a model return it as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ... import HmpError
from . import streams
from .graph_capture import GraphCapture
from .graph_replay import Captured
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
    """A step that runs once while it is captured, and again at each `replay()`, on the current values of its tensors.

    The calls of torch's kernels are captured: forward, backward, casts, the optimizer. A replay draws new random numbers and makes the
    gradients again. It does not run the step's Python; if that would change the result, the capture or the replay raises HmpError.

    Example:
        >>> with hmp.compat.habana.install("cpu"):
        ...     x, graph = torch.ones(2), torch.hpu.HPUGraph()
        ...     graph.capture_begin()
        ...     y = x * 2
        ...     graph.capture_end()
        ...     _ = x.fill_(3)
        ...     graph.replay()
        ...     graph.reset()
        >>> y
        tensor([6., 6.])
    """

    def __init__(self) -> None:
        self._capture: GraphCapture | None = None
        self._captured: Captured | None = None

    def capture_begin(self, dry_run: bool = False) -> None:
        """Begin the capture of what this thread runs.

        Args:
            dry_run: Must be False: the step runs while it is captured.

        Raises:
            HmpError: `dry_run` is True, or a capture has begun already.
        """
        if dry_run:
            raise HmpError(
                "HPUGraph.capture_begin(): dry_run= expected False, got True: a step runs while it is captured; leave dry_run out"
            )
        if self._capture is not None:
            raise HmpError("HPUGraph.capture_begin(): the capture of this graph has already begun; call capture_end() first")
        capture = GraphCapture()
        capture.open()
        self._capture, self._captured = capture, None

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            HmpError: No capture has begun, or a replay could not repeat the step.
        """
        capture = self._abandon()
        if capture is None:
            raise HmpError("HPUGraph.capture_end(): no capture has begun; call capture_begin() first")
        self._captured = capture.captured()

    def replay(self, asynchronous: bool = False) -> None:
        """Run the step again, into the tensors of the capture.

        Args:
            asynchronous: Has no effect: kernels run in the current stream, on the CPU until this returns.

        Raises:
            HmpError: Nothing was captured, or a tensor, gradient or setting of an optimizer is no longer that of the capture.
        """
        if self._captured is None:
            raise HmpError("HPUGraph.replay(): expected a captured step, got none; run one between capture_begin() and capture_end()")
        self._captured.replay()

    def reset(self) -> None:
        """Delete the captured step."""
        self._captured = None

    def _abandon(self) -> GraphCapture | None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()
        return capture


@contextlib.contextmanager
def graph(hpu_graph: HPUGraph, stream: Any = None, **options: Any) -> Iterator[None]:
    """Capture a step: `with torch.hpu.graph(g): ...`. After an exception nothing is captured.

    Args:
        hpu_graph: The graph to capture into.
        stream: A stream to run the step in; None is the current one.
        **options: Habana's. `dry_run` must be False; others have no effect.

    Example:
        >>> with hmp.compat.habana.install("cpu"):
        ...     x, g = torch.ones(2), torch.hpu.HPUGraph()
        ...     with torch.hpu.graph(g):
        ...         y = x + 1
        ...     _ = x.fill_(3)
        ...     g.replay()
        >>> y
        tensor([4., 4.])
    """
    with contextlib.nullcontext() if stream is None else streams.stream(stream):
        hpu_graph.capture_begin(dry_run=bool(options.get("dry_run")))
        try:
            yield
        except BaseException:
            hpu_graph._abandon()
            raise
        hpu_graph.capture_end()
