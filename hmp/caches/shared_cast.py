"""Uses of one cast that share its memory and not its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..casting import Tensor, cast

# torch's own, taken before anything is patched
_detach = Tensor.detach

# Below so many bytes a cast costs less than sharing one: measured, 4 microseconds. In bytes because numel() is an op in a trace.
WORTH_SHARING = 32768


class Shared(torch.autograd.Function):
    """The memory of a copy that was made before, with a gradient of its own for this use."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        ctx.set_materialize_grads(False)  # no gradient stays no gradient: zeros would make an optimizer decay the weight
        return _detach(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else cast(grad, ctx.dtype), None


shared: Callable[[Tensor, Tensor], Tensor] = Shared.apply
