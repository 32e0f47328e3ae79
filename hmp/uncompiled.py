"""Compiled code runs as it was written, while anybody here asks for that."""

from __future__ import annotations

from typing import Any

import torch

from . import fork_safe

_lock = fork_safe.RLock()
_asking: list[object] = []
_stance: Any = None


def run_uncompiled(asks: object) -> None:
    """Has compiled code run as it was written until `run_compiled` was called for each that asks, in whatever order: a conversion may begin
    in a recording and end after it. torch's own stances end in the order of their beginnings alone."""
    global _stance
    with _lock:
        if not _asking:
            _stance = torch.compiler.set_stance("force_eager")
        _asking.append(asks)


def run_compiled(asks: object) -> None:
    """Takes back what `asks` asked for. May be called again, after an interrupt."""
    with _lock:
        if _asking == [asks]:
            _stance.__exit__(None, None, None)
        if asks in _asking:
            _asking.remove(asks)
