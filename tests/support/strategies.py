"""Hypothesis strategies: tensors of every dtype and kind, and the ways in which a call may spell its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from oracle import BF16, CASTABLE, F16, F32, F64

INTEGER = (torch.int64, torch.int32, torch.uint8, torch.bool)
NEVER_CAST = (F64, torch.complex64, *INTEGER)
EVERY = (*CASTABLE, *NEVER_CAST)


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
    if isinstance(tree, Leaf):
        return tree.build()
    if isinstance(tree, (list, tuple)):
        return type(tree)(build(item) for item in tree)
    if isinstance(tree, dict):
        return {key: build(item) for key, item in tree.items()}
    return tree


kinds = st.sampled_from(["plain", "plain", "parameter", "subclass", "transposed", "strided"])
castable_dtypes = st.sampled_from(CASTABLE)
# Mostly what a rule casts; now and then what it must leave alone.
any_dtypes = st.one_of(castable_dtypes, castable_dtypes, castable_dtypes, st.sampled_from(NEVER_CAST))
seeds = st.integers(0, 2**16)


@st.composite
def leaves(
    draw: st.DrawFn,
    shape: Sequence[int] | st.SearchStrategy[tuple[int, ...]],
    dtypes: st.SearchStrategy[torch.dtype] = castable_dtypes,
    values: str = "normal",
    grad: bool = True,
    subclass: bool = True,
) -> Leaf:
    """A leaf of this shape (a strategy draws one), of a drawn dtype, kind and content.

    Where the identity of what is returned matters, no subclass: torch wraps what it returns once a subclass takes part.
    """
    size = draw(shape) if isinstance(shape, st.SearchStrategy) else tuple(shape)
    return Leaf(
        tuple(size),
        draw(dtypes),
        draw(kinds if subclass else kinds.filter(lambda k: k != "subclass")),
        grad and draw(st.booleans()),
        values,
        draw(seeds),
    )


# Shapes that broadcast together: 0-dim, empty, one and two dimensions.
broadcastable = st.sampled_from(
    [((), ()), ((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 3), (3,)), ((0,), (0,)), ((2, 3), (2, 1)), ((0, 3), (3,))]
)


@st.composite
def pairs(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = any_dtypes, values: str = "normal") -> list[Leaf]:
    """Two leaves that broadcast, 0-dim and empty ones among them."""
    one, other = draw(broadcastable)
    return [draw(leaves(one, dtypes, values)), draw(leaves(other, dtypes, values))]


@st.composite
def spelled(draw: st.DrawFn, names: Sequence[str], values: Sequence[Any], positional: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as a caller may write them: the first few by position, the rest by keyword and in any order."""
    first = draw(st.integers(positional, len(values)))
    rest = draw(st.permutations(list(zip(names, values, strict=True))[first:]))
    return tuple(values[:first]), dict(rest)


__all__ = [
    "BF16", "CASTABLE", "EVERY", "F16", "F32", "F64", "INTEGER", "NEVER_CAST", "Leaf", "Tagged", "any_dtypes",
    "broadcastable", "build", "castable_dtypes", "kinds", "leaves", "pairs", "seeds", "spelled",
]  # fmt: skip
