"""What the collectives of several processes write, of which their schemas say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.casting import each_tensor

# `c10d` writes into its first argument, and `_c10d_functional` returns new memory.
NAMESPACES = frozenset({"c10d", "_c10d_functional"})
# Two processes send to each other: each would wait for the other to receive.
_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})


def is_collective(func: Any) -> bool:
    """Whether processes take part in the op together."""
    return func.namespace in NAMESPACES


def is_point_to_point(func: Any) -> bool:
    """Whether the collective is one process's alone: it sends, or receives."""
    return func._schema.name.partition("::")[2] in _POINT_TO_POINT


def written(func: Any, args: Any) -> list[torch.Tensor]:
    """Which of the collective's arguments it writes."""
    return list(each_tensor(args[:1])) if func.namespace == "c10d" else []


def run(func: Any, args: Any, kwargs: Any, call: Callable[..., Any] | None = None) -> Any:
    """What the collective returns, once the values are there. One to one other process is not waited for."""
    out = (call or func)(*args, **kwargs)
    if is_point_to_point(func):
        return out
    for work in out if isinstance(out, tuple) else (out,):
        if isinstance(work, torch.ScriptObject):
            work.wait()  # type: ignore[attr-defined]  # torch.classes.c10d.Work
    if func.namespace != "c10d":
        for tensor in each_tensor((out,)):
            getattr(torch.ops, func.namespace).wait_tensor(tensor)
    return out
