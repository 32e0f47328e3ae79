"""R14: a checkpoint's recomputation runs under the policy of its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import torch_private
from ..active import UnderCapturedState, call_without_casts
from ..cast_cache import weight_cache
from ..observe import tell_checkpoint
from ..patching import patches
from . import late_imports
from .torchs_functions import wrap


def install() -> None:
    """Until patches.restore(): a recomputation runs under the policy of its forward, in whatever thread backward runs (R14)."""

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ctx, run_function, *args: weight_cache.call_to_run_again(original, ctx, UnderCapturedState(run_function), *args)

    def generator(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            tell_checkpoint(args)
            return original(UnderCapturedState(fn), *args, **kwargs)

        return generate

    def unasked(original: Callable[..., Any]) -> Callable[..., Any]:
        # it asks whether torch.autocast is enabled for CUDA, to enable it again in backward
        return lambda ctx, run_function, *args: call_without_casts(forward(original), ctx, UnderCapturedState(run_function), *args)

    wrap("torch.utils.checkpoint", "CheckpointFunction.forward", forward)
    xlas = "torch_xla.utils.checkpoint"  # torch's own knows no XLA
    late_imports.after({xlas: functools.partial(wrap, xlas, "CheckpointFunction.forward", unasked)})
    patches.wrap(*torch_private.checkpoint_generator(), generator)
