"""`habana_frameworks.torch.hpu.graphs`: a captured step is replayed; what would capture a model gives it back as it is."""

from __future__ import annotations

import contextlib
from typing import Any

from ... import HmpError
from . import streams
from .captured import Captured
from .capturing import Capture
from .nothing import DOES_NOTHING, does_nothing

__all__ = ["HPUGraph", "ModuleCacher", "graph", "make_graphed_callables", "wrap_in_hpu_graph"]

_WHY = "the model runs op by op"


wrap_in_hpu_graph = does_nothing("wrap_in_hpu_graph", _WHY, lambda *args, **kwargs: args[0] if args else kwargs["module"])
make_graphed_callables = does_nothing("make_graphed_callables", _WHY, lambda first, *args, **kwargs: first)


class ModuleCacher:
    """`ModuleCacher(...)(model, ...)` is the model."""

    here = DOES_NOTHING, _WHY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __call__ = staticmethod(does_nothing("ModuleCacher", _WHY, lambda *args, **kwargs: args[0] if args else kwargs["model"]))


class HPUGraph:
    """A step that runs once while it is captured, and again at each `replay()`, on the values that its tensors have then.

    Captured are the calls of torch's kernels: forward, backward, a policy's casts, the optimizer. Random numbers are drawn anew. A gradient
    that the step made is made anew. What Python does in the step is not repeated; where that would make a replay another step, the capture
    or the replay is an HmpError.
    """

    def __init__(self) -> None:
        self._capture: Capture | None = None
        self._captured: Captured | None = None

    def capture_begin(self, dry_run: bool = False) -> None:
        """What runs in this thread from here on is captured, and runs. HmpError for `dry_run`."""
        if dry_run:
            raise HmpError("HPUGraph.capture_begin(dry_run=True): a step is captured while it runs; leave dry_run out")
        if self._capture is not None:
            raise HmpError("HPUGraph.capture_begin(): this graph is being captured; call capture_end() first")
        capture = Capture()
        capture.open()
        self._capture, self._captured = capture, None

    def capture_end(self) -> None:
        """The end of what is captured."""
        capture = self._abandon()
        if capture is None:
            raise HmpError("HPUGraph.capture_end(): nothing is being captured; call capture_begin() first")
        self._captured = capture.captured()

    def replay(self, asynchronous: bool = False) -> None:
        """Runs the step again, into the tensors of the capture; it is done when this returns, or on an accelerator in the stream."""
        if self._captured is None:
            raise HmpError("HPUGraph.replay(): nothing was captured; capture a step between capture_begin() and capture_end()")
        self._captured.replay()

    def reset(self) -> None:
        """Forgets what was captured."""
        self._captured = None

    def _abandon(self) -> Capture | None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()
        return capture


class graph:
    """A region that is captured: `with torch.hpu.graph(g): ...`. A step that raises leaves nothing captured."""

    def __init__(self, hpu_graph: HPUGraph, stream: Any = None, **options: Any) -> None:
        self._graph = hpu_graph
        self._stream = contextlib.nullcontext() if stream is None else streams.stream(stream)
        self._options = options

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stream)
            self._graph.capture_begin(dry_run=bool(self._options.get("dry_run")))
            self._open = stack.pop_all()

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        with self._open:
            if kind is None:
                self._graph.capture_end()
            else:
                self._graph._abandon()
