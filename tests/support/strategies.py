"""Tensors of every dtype, made anew each time from what says which, and classes as users have them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from oracle import F32

INTEGER = (torch.int64, torch.int32, torch.uint8, torch.bool)


class Tagged(torch.Tensor):
    """A subclass as users write them: nothing but a name, torch's own `__torch_function__`."""


class Outputs(OrderedDict[str, Any]):
    """What models of transformers return: the values are attributes too, and there is no update()."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no update()")


@dataclass(frozen=True)
class Leaf:
    """A tensor to be: `build` makes a new one with the same bits each time. Its repr is the counter-example."""

    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    grad: bool = True
    values: str = "normal"  # normal, positive, probability
    seed: int = 0

    def build(self) -> torch.Tensor:
        # not torch.get_default_device(), which torch 2.7 and 2.9 cannot answer after set_default_device(None)
        tensor = torch.from_numpy(np.asarray(self._values(), np.float32)).to(torch.empty(0).device, self.dtype)
        return tensor.detach().requires_grad_(self.grad and (tensor.is_floating_point() or tensor.is_complex()))

    def _values(self) -> np.ndarray:
        # numpy, because torch's own arithmetic is what a policy changes when this runs inside a region
        random = np.random.default_rng(self.seed)
        if self.values == "probability":
            return random.random(self.shape, np.float32) * np.float32(0.9) + np.float32(0.05)
        values = random.standard_normal(self.shape, np.float32) * np.float32(2)
        if not self.dtype.is_floating_point:
            values = np.abs(np.round(values * 3))  # uint8 has no negative numbers
        return np.abs(values) + np.float32(0.25) if self.values == "positive" else values


def build(tree: Any) -> Any:
    """New tensors in place of the leaves of a tree."""
    return tree_map(lambda leaf: leaf.build() if isinstance(leaf, Leaf) else leaf, tree)
