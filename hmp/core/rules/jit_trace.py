"""resume() continues a torch.jit trace after an op has raised and is tried again (R7, R11). torch itself ends a trace at any error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..patching import patches
from ..torch_private import TRACERS, ScriptModule, set_trace
from ..torch_private import trace_here as tracing


class _TraceOfThread(threading.local):
    trace: Any = None  # torch's object for the trace that this thread is making


_here = _TraceOfThread()


def install() -> None:
    """Have every new trace noted for `resume`, until patches.restore()."""
    for owner, name in TRACERS:
        patches.rebind(owner, name, _maker(getattr(owner, name)))


def _maker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, a function of torch's that makes a trace, for which the traced function notes the trace."""

    def make(*args: Any, **kwargs: Any) -> Any:
        traced = next(i for i, a in enumerate(args) if callable(a) and not isinstance(a, ScriptModule))
        return original(*args[:traced], _noted(args[traced]), *args[traced + 1 :], **kwargs)

    return make


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        before, trace = _here.trace, tracing()
        try:
            _here.trace = trace
            result = function(*args, **kwargs)
        finally:
            _here.trace = before
        if tracing() is None:
            raise RuntimeError("torch ended this trace at an error that the traced code caught")  # torch itself crashes on it
        return result

    return traced


def resume() -> None:
    """Continue the trace that an op's error has just ended, and take that op out of it. Do nothing without a trace."""
    trace = _here.trace
    if trace is None or tracing() is not None:
        return
    nodes = list(trace.graph().nodes())
    if nodes and nodes[-1].outputsSize() == 0:
        if not nodes[-1].kind().startswith("aten::"):
            return  # a user's autograd.Function, inside which torch traces nothing
        nodes[-1].destroy()  # the op that failed: torch cannot read a graph that holds it
    set_trace(trace)
