"""What an observer of FP8 products is told of every tensor that is quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from ..casting import Tensor, with_exponent
from .quantising import Quantised

# torch's own, taken before anything is patched
_abs, _and, _eq, _max, _mean = torch.abs, torch.logical_and, torch.eq, torch.max, torch.mean
_min, _nan_to_num, _narrow, _ne, _stack = torch.min, torch.nan_to_num, torch.narrow, torch.ne, torch.stack
_float, _to = Tensor.float, Tensor.to


Role = Literal["input", "weight", "grad"]


class Statistics(NamedTuple):
    """Of one quantised tensor; tensors, so that the device is not waited for. `role` is that of the tensor in the product.

    A tensor that is quantised twice, along the rows and along the columns for a product of backward, has two of these.

    `amax` is the largest finite magnitude and `scale` what Quantised.scale is. `saturated` is the share of elements at the format's largest
    number, the nearest they can be to more, and `flushed` the share that are 0 in the format and were not before.
    """

    role: Role
    amax: Tensor
    scale: Tensor
    saturated: Tensor
    flushed: Tensor

    def figures(self) -> Tensor:
        """Five float32 numbers: amax, the least and the greatest scale, the shares saturated and flushed."""
        scale = self.scale if self.scale.dtype is torch.float32 else with_exponent(_to(self.scale, torch.int32))
        return _stack([self.amax, _min(scale), _max(scale), self.saturated, self.flushed])


Observer = Callable[[Statistics], None]


def statistics_of(role: Role, tensor: Tensor, quantised: Quantised) -> Statistics:
    """What quantising `tensor` did to it."""
    with torch.no_grad():
        # without the zeros that blocks are filled up with
        codes = _float(_narrow(_narrow(quantised.data, -2, 0, tensor.shape[-2]), -1, 0, tensor.shape[-1]))
        amax = _float(_max(_nan_to_num(_abs(tensor), 0.0, 0.0, 0.0)))
        saturated = _mean(_float(_eq(_abs(codes), torch.finfo(quantised.data.dtype).max)))
        flushed = _mean(_float(_and(_eq(codes, 0), _ne(tensor, 0))))
    return Statistics(role, amax, quantised.scale, saturated, flushed)
