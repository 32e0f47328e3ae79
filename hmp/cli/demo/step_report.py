"""What one training step did, seen from below: the ATen ops that were dispatched and the tensors that were saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...benchmark.saved_bytes import SavedBytes

_CASTS = ("_to_copy", "to")
# These move or make data; the precision of a computation is not theirs to show.
_NOT_COMPUTING = {*_CASTS, "_unsafe_view", "clone", "copy_", "detach", "empty_like", "fill_", "ones_like", "zeros_like"}
# A view, so it computes nothing; but it is on a published list, so it is looked at.
_VIEWS_SHOWN = {"t"}


@dataclass(frozen=True)
class StepReport:
    """One forward pass, backward pass and optimizer step.

    ``ran`` holds the calls of each (ATen op, compute dtype) of the forward pass, where the compute dtype is that of
    the op's first floating input: the activation where weights or statistics stand beside it.
    ``casts`` counts the changes of dtype in the whole step, those that autograd and the optimizer make included.
    ``saved_bytes`` is what the forward pass kept for the backward pass, each storage once, parameters and buffers
    left out; a low-precision copy of a parameter is in it, for it lives as long.
    """

    ran: Mapping[tuple[str, torch.dtype], int]
    casts: int
    saved_bytes: int

    def dtypes(self, op: str) -> set[torch.dtype]:
        """Return the dtypes in which an ATen op ran: empty if it did not run."""
        return {dtype for name, dtype in self.ran if name == op}

    def ops(self, dtype: torch.dtype) -> list[str]:
        """Return the ATen ops that computed in ``dtype``, in the order of their first calls."""
        return [name for name, ran_in in self.ran if ran_in == dtype]


class StepObserver:
    """Observes one step: ``with observer.step():`` around it, ``with observer.forward():`` around model and loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._saved = SavedBytes([*model.parameters(), *model.buffers()])
        self._dispatch = _Dispatch()

    @contextmanager
    def step(self) -> Iterator[None]:
        with self._dispatch:
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._saved.watch():
            self._dispatch.in_forward = True
            try:
                yield
            finally:
                self._dispatch.in_forward = False

    def report(self) -> StepReport:
        return StepReport(dict(self._dispatch.ran), self._dispatch.casts, self._saved.bytes)


class _Dispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[tuple[str, torch.dtype]] = Counter()
        self.casts = 0
        self.in_forward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _CASTS:
            self.casts += args[0].dtype != result.dtype
        elif self.in_forward and (name in _VIEWS_SHOWN or not (func.is_view or name in _NOT_COMPUTING)):
            dtype = _compute_dtype((args, kwargs))
            if dtype is not None:
                self.ran[name, dtype] += 1
        return result


def _compute_dtype(arguments: Any) -> torch.dtype | None:
    for leaf in tree_iter(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.dtype
    return None
