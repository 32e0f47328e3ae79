"""Calls of matrix products, for plug-ins that compute these themselves: one form of the ops' arguments, and one of their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..casting import Tensor, in_shape
from ..torch_private import is_any_autocast_enabled, is_autocast_available

# torch's own, taken before anything is patched
_expand, _reshape = Tensor.expand, torch.reshape
_grad_enabled = torch.is_grad_enabled


class ProductCall(NamedTuple):
    """A call's arguments, whatever the op calls them: the operands, what is added, and the rest."""

    operands: tuple[Any, ...]
    added: Any = None
    beta: Any = 1
    alpha: Any = 1
    out: Any = None
    out_dtype: Any = None
    equation: str = ""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Return the operands and what is added."""
        return self.operands if self.added is None else (*self.operands, self.added)


def _linear(input: Any, weight: Any, bias: Any = None) -> ProductCall:
    return ProductCall((input, weight), bias)


def _matmul(input: Any, other: Any, *, out: Any = None) -> ProductCall:
    return ProductCall((input, other), out=out)


def _rmatmul(input: Any, other: Any) -> ProductCall:
    return ProductCall((other, input))


def _mm(input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> ProductCall:
    return ProductCall((input, mat2), out=out, out_dtype=out_dtype)


def _addmm(input: Any, mat1: Any, mat2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall((mat1, mat2), input, beta, alpha, out, out_dtype)


def _baddbmm(input: Any, batch1: Any, batch2: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall((batch1, batch2), input, beta, alpha, out, out_dtype)


def _addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> ProductCall:
    return ProductCall((batch1, batch2), input, beta, alpha, out)


def _einsum(equation: Any, *operands: Any) -> ProductCall:
    if not isinstance(equation, str):
        raise TypeError("expected an equation as a string")
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return ProductCall(operands, equation=equation)


# By op: a function with the op's parameters. It raises TypeError for arguments that a plug-in can't take.
CALLS: dict[str, Callable[..., ProductCall]] = {
    "linear": _linear,
    "matmul": _matmul,
    "linalg.matmul": _matmul,
    "rmatmul": _rmatmul,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "addbmm": _addbmm,
    "einsum": _einsum,
}
# How many dimensions both operands have, where an op takes no other number.
_DIMS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3, "addbmm": 3}


def fits(op: str, left: Tensor, right: Tensor) -> bool:
    """Return True if the op takes both, as matrices or as batches of matrices that broadcast; a left vector is one row."""
    if right.dim() < 2 or left.dim() < 1 or left.shape[-1] != right.shape[-1 if op == "linear" else -2]:
        return False
    if op in _DIMS and (left.dim(), right.dim()) != (_DIMS[op], _DIMS[op]):
        return False
    if right.dim() == 2:
        return True
    if op in _DIMS:
        return bool(left.shape[0] == right.shape[0])
    pairs = zip(reversed(left.shape[:-2]), reversed(right.shape[:-2]), strict=False)
    return op != "linear" and left.dim() > 1 and all(one == other or one == 1 or other == 1 for one, other in pairs)


def multiplied(op: str, left: Tensor, right: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the op's product of operands that fit. `multiply` takes two matrices, or two batches of as many."""
    columns = right.shape[-2 if op == "linear" else -1]
    if right.dim() == 2:
        rows = left if left.dim() == 2 else _reshape(left, (-1, left.shape[-1]))
        return in_shape(multiply(rows, right), (*left.shape[:-1], columns))
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts, rights = (_batches(each, batch) for each in (left, right))
    return in_shape(multiply(lefts, rights), (*batch, left.shape[-2], columns))


def _batches(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Return the tensor as one batch of matrices, its batch dimensions broadcast."""
    if tensor.dim() == 3 and tensor.shape[:1] == batch:
        return tensor
    return _reshape(_expand(tensor, (*batch, *tensor.shape[-2:])), (-1, *tensor.shape[-2:]))


def why_not_rest(call: ProductCall, *out_dtypes: torch.dtype) -> str:
    """Return why a plug-in can't take the arguments besides the operands, `out=` of other dtypes among them; "" where it can."""
    if call.out_dtype is not None:
        return "out_dtype is given"
    if not isinstance(call.beta, (int, float)) or not isinstance(call.alpha, (int, float)):
        return "an alpha or beta that isn't a number"
    if call.out is None:
        return ""
    if not isinstance(call.out, Tensor) or call.out.dtype not in out_dtypes or call.out.layout is not torch.strided:
        return "out= of another kind"
    needs_gradient = _grad_enabled() and any(each.requires_grad for each in call.tensors)
    return "out= where a gradient is needed" if needs_gradient or call.out.requires_grad else ""


def outside_autocast(device: torch.device, compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `compute(*args)`, of whose tensors torch.autocast, where it is on, would take its own dtype."""
    if is_any_autocast_enabled() and is_autocast_available(device.type):
        with torch.autocast(device.type, enabled=False):
            return compute(*args)
    return compute(*args)
