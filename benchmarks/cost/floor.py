"""The floor: wrappers of ops, written by hand, that compare dtypes and do nothing else.

They replace the ops while they are measured, as hmp's wrappers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BF16, _FP32 = torch.bfloat16, torch.float32
Op = Callable[..., Any]


def _refused(*args: object) -> None:
    raise AssertionError("the floor was called with something to cast")


def linear(op: Op) -> Op:
    def wrapper(x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
        return op(x, w, b) if x.dtype is _BF16 and w.dtype is _BF16 and (b is None or b.dtype is _BF16) else _refused()

    return wrapper


def binary_bf16(op: Op) -> Op:
    def wrapper(a: Tensor, b: Tensor) -> Any:
        return op(a, b) if a.dtype is _BF16 and b.dtype is _BF16 else _refused()

    return wrapper


def addmm(op: Op) -> Op:
    def wrapper(c: Tensor, a: Tensor, b: Tensor) -> Any:
        return op(c, a, b) if c.dtype is _BF16 and a.dtype is _BF16 and b.dtype is _BF16 else _refused()

    return wrapper


def layer_norm(op: Op) -> Op:
    def wrapper(x: Tensor, shape: Any, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5) -> Any:
        if x.dtype is _BF16 and (w is None or b is None or w.dtype is b.dtype):
            return op(x, shape, w, b, eps)
        return _refused()

    return wrapper


def softmax(op: Op) -> Op:
    def wrapper(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
        return op(x, dim, _stacklevel, dtype) if x.dtype is _FP32 else _refused()

    return wrapper


def binary_same(op: Op) -> Op:
    def wrapper(a: Tensor, b: Tensor) -> Any:
        return op(a, b) if a.dtype is b.dtype else _refused()

    return wrapper


# where the op is called, its name there, and its wrapper
PLACES: tuple[tuple[Any, str, Callable[[Op], Op]], ...] = (
    (F, "linear", linear),
    (torch, "matmul", binary_bf16),
    (Tensor, "matmul", binary_bf16),
    (Tensor, "__matmul__", binary_bf16),
    (torch, "bmm", binary_bf16),
    (torch, "addmm", addmm),
    (F, "layer_norm", layer_norm),
    (F, "softmax", softmax),
    (torch, "add", binary_same),
)


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Patch torch with the wrappers inside the context."""
    undo: list[tuple[Any, str, bool, Any]] = []
    try:
        for owner, name, make in PLACES:
            own = name in vars(owner)
            original = vars(owner)[name] if own else getattr(owner, name)
            undo.append((owner, name, own, original))
            setattr(owner, name, make(original))
        yield
    finally:
        for owner, name, own, original in reversed(undo):
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)  # it was inherited
