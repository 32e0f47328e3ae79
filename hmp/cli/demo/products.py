"""Whether low precision can save time on this processor: a product of matrices in bfloat16 beside one in float32."""

from __future__ import annotations

from functools import partial

import torch

from ...benchmark.timing import least_seconds

_SHAPES = ((512, 192), (192, 576))  # of the transformer's widest product
_CALLS = 20
_FASTER = 0.9  # a product that takes more than this of float32's time leaves casts nothing to win


def time_ratio() -> float:
    """Return how long the product takes in bfloat16, relative to float32: of the least disturbed of some calls."""
    left, right = (torch.ones(shape) for shape in _SHAPES)
    low, full = partial(torch.mm, left.bfloat16(), right.bfloat16()), partial(torch.mm, left, right)
    in_low, in_full = least_seconds([low, full], _CALLS, left.device)
    return in_low / in_full


def slower(ratio: float) -> str:
    """Return the sentence for a processor on which low precision saves no time; "" where it can."""
    if ratio <= _FASTER:
        return ""
    return (
        f"Low precision saves memory but no time on this processor: a product of matrices takes {ratio:.1f} times as long in "
        "bfloat16 as in float32 (hmp doctor names its instructions)."
    )
