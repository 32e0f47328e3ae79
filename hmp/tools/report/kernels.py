"""What runs inside an op that torch.autocast decides: in which dtypes its kernels compute, and what it casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.casting import Tensor, castable, each_castable
from ...core.torch_private import TorchDispatchMode, tree_leaves

# They move values or make none: what they get says nothing of the dtype that an op computes in.
_MOVES = frozenset("_to_copy clone copy_ cat stack empty_like zeros_like ones_like new_empty new_zeros _unsafe_view".split())


class Kernels(TorchDispatchMode):
    """The mode. `dtypes` are those of the first castable inputs of the ATen ops that compute, each once, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: dict[Any, None] = {}
        self.casts = 0
        self.cast_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The op's own result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        first = next(each_castable(tree_leaves((args, kwargs))), None)
        if first is None:
            return result
        name = func._schema.name.partition("::")[2]
        if name == "_to_copy":
            if isinstance(result, Tensor) and castable(result) and result.dtype is not first.dtype:
                self.casts += 1
                self.cast_bytes += nbytes_of(first)
        elif name not in _MOVES and not func.is_view:
            self.dtypes[first.dtype] = None
        return result


def nbytes_of(tensor: Tensor) -> int:
    """The bytes of the tensor's elements, of a sparse one of those that it stores."""
    if tensor.layout is torch.sparse_coo:
        return int(tensor._values().nbytes)
    return int(tensor.nbytes if tensor.layout is torch.strided else tensor.values().nbytes)


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for calls that run the same kernels on other values: shapes, dtypes and flags of tensors, and what else was passed."""
    return tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_leaf) if isinstance(leaf, Tensor) else (type(leaf), str(leaf))
        for leaf in tree_leaves((args, kwargs))
    )


def waiting() -> Callable[[], None] | None:
    """What waits for the accelerator, so that times are those of its kernels; None where there is none."""
    return torch.accelerator.synchronize if torch.accelerator.is_available() else None
