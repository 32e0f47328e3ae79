"""Several uses of one cast, which share its memory but each have a gradient of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..casting import Tensor, cast

# torch's own, taken before anything is patched
_detach = Tensor.detach

# Bytes of a tensor from which sharing a cast (measured: 4 microseconds a use) is quicker than casting. Not numel(), an op in a trace.
WORTH_SHARING = 32768


class Shared(torch.autograd.Function):
    """`copy`, a cast of `source` made before, as a new node of the graph: its gradient flows to `source`, in the dtype of `source`."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        ctx.set_materialize_grads(False)  # None stays None: with a gradient of zeros an optimizer would decay the weight
        return _detach(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else cast(grad, ctx.dtype), None


shared: Callable[[Tensor, Tensor], Tensor] = Shared.apply
