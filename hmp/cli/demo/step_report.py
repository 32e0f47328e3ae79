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
from ...low_kernels import computed_in_float32

_CASTS = ("_to_copy", "to")
# These move or make data; the precision of a computation is not theirs to show.
_NOT_COMPUTING = {*_CASTS, "_unsafe_view", "clone", "copy_", "detach", "empty_like", "fill_", "ones_like", "zeros_like"}
# A view, so it computes nothing; but it is on a published list, so it is looked at.
_VIEWS_SHOWN = {"t"}
_PRODUCTS = {"addmm", "bmm", "mm", "convolution"}


@dataclass(frozen=True)
class StepReport:
    """One forward pass, backward pass and optimizer step.

    ``ran`` holds the calls of each (ATen op, compute dtype) of the forward pass, where the compute dtype is that of
    the op's first floating input: the activation where weights or statistics stand beside it. A product that computes
    in float32 because the processor has no bfloat16 instructions counts as bfloat16 if all its inputs are bfloat16 numbers.
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
    """Observes steps: one inside ``dispatched()``, whose ops are seen, and one whose forward is inside ``saving()``.

    They are two because ops that are dispatched to an observer keep more for backward.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._saved = SavedBytes([*model.parameters(), *model.buffers()])
        self._dispatch = _Dispatch()

    @contextmanager
    def dispatched(self) -> Iterator[None]:
        with self._dispatch:
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._dispatch.in_forward = True
        try:
            yield
        finally:
            self._dispatch.in_forward = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        with self._saved.watch():
            yield

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
            dtype = _compute_dtype(name, (args, kwargs))
            if dtype is not None:
                self.ran[name, dtype] += 1
        return result


def _compute_dtype(name: str, arguments: Any) -> torch.dtype | None:
    tensors = [leaf for leaf in tree_iter(arguments) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not tensors:
        return None
    low = torch.bfloat16
    if name in (_PRODUCTS | _VIEWS_SHOWN) and low in computed_in_float32() and all(torch.equal(t.to(low).to(t.dtype), t) for t in tensors):
        return low
    return tensors[0].dtype
