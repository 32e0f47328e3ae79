"""Tensors of every dtype and kind, made anew each time from what says which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from oracle import F32

INTEGER = (torch.int64, torch.int32, torch.uint8, torch.bool)


class Tagged(torch.Tensor):
    """A subclass as users write them: nothing but a name, torch's own `__torch_function__`."""


@dataclass(frozen=True)
class Leaf:
    """A tensor to be: `build` makes a new one with the same bits each time. Its repr is the counter-example."""

    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    kind: str = "plain"  # plain, parameter, subclass, transposed, strided
    grad: bool = True
    values: str = "normal"  # normal, positive, probability
    seed: int = 0

    def build(self) -> torch.Tensor:
        tensor = self._laid_out(self._values())
        floating = tensor.is_floating_point() or tensor.is_complex()
        if self.kind == "parameter" and floating:
            return torch.nn.Parameter(tensor, requires_grad=self.grad)
        if self.kind == "subclass":
            tensor = tensor.as_subclass(Tagged)
        return tensor.detach().requires_grad_(self.grad and floating)

    def _values(self) -> np.ndarray:
        # numpy, because torch's own arithmetic is what a policy changes when this runs inside a region
        random = np.random.default_rng(self.seed)
        if self.values == "probability":
            return random.random(self.shape, np.float32) * np.float32(0.9) + np.float32(0.05)
        values = random.standard_normal(self.shape, np.float32) * np.float32(2)
        if not self.dtype.is_floating_point:
            values = np.abs(np.round(values * 3))  # uint8 has no negative numbers
        return np.abs(values) + np.float32(0.25) if self.values == "positive" else values

    def _laid_out(self, values: np.ndarray) -> torch.Tensor:
        if self.kind == "transposed" and values.ndim > 1:
            return self._tensor(np.ascontiguousarray(values.swapaxes(-1, -2))).transpose(-1, -2)
        if self.kind == "strided" and values.ndim > 0:
            return self._tensor(np.stack([values, values], -1))[..., 0]
        return self._tensor(values)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        # not torch.get_default_device(), which torch 2.7 and 2.9 cannot answer after set_default_device(None)
        return torch.from_numpy(np.asarray(values, np.float32)).to(torch.empty(0).device, self.dtype)


def build(tree: Any) -> Any:
    """New tensors in place of the leaves of a tree."""
    return tree_map(lambda leaf: leaf.build() if isinstance(leaf, Leaf) else leaf, tree)
