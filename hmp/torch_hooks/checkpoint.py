"""R14: a checkpoint's recomputation runs under the policy of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import torch_private
from ..caches import weight_cache
from ..context import UnderCapturedState
from .torchs_functions import python_function_at, replace, swap


def install() -> None:
    """Until patches.restore(): a recomputation runs under the policy of its forward, in whatever thread backward runs (R14)."""

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ctx, run_function, *args: weight_cache.call_to_run_again(original, ctx, UnderCapturedState(run_function), *args)

    def generator(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda fn, *args, **kwargs: original(UnderCapturedState(fn), *args, **kwargs)

    replace("torch.utils.checkpoint", "CheckpointFunction.forward", forward)
    swap(python_function_at(torch_private.checkpoint_generator()), generator)
