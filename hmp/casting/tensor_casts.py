"""Tensor in, tensor out: what can be cast, how, and to what. No op names, no state."""

from __future__ import annotations

import copy
import functools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch

from ..torch_private import MKLDNN as MKLDNN

Tensor = torch.Tensor
Caster = Callable[[Tensor, torch.dtype], Tensor]

CASTABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
# An op that has one of these among its inputs is left to torch.
LEFT_TO_TORCH = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})
FINITE_MAX = {dtype: torch.finfo(dtype).max for dtype in CASTABLE}

# torch's own methods, taken before anything is patched. x.bfloat16() takes 0.6 of the time of x.to(torch.bfloat16).
TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: torch.Tensor.float,
    torch.bfloat16: torch.Tensor.bfloat16,
    torch.float16: torch.Tensor.half,
}
_clamp = torch.clamp
_isinf = torch.isinf
_where = torch.where
_and = torch.logical_and
_not = torch.logical_not
_detach = torch.Tensor.detach
_dispatch = torch.Tensor.__torch_dispatch__


def castable(value: object) -> TypeGuard[Tensor]:
    """Whether `value` is a dense or sparse float32, bfloat16 or float16 tensor."""
    return isinstance(value, Tensor) and value.dtype in CASTABLE and value.layout is not MKLDNN


def has_values(tensor: Tensor) -> bool:
    """Whether torch's kernels compute on the tensor: it is not on the meta device, and no subclass (a fake tensor) answers in its place."""
    return not tensor.is_meta and type(tensor).__torch_dispatch__ is _dispatch


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`; the same object where it has that dtype. Differentiable: the gradient comes back in the tensor's dtype."""
    return tensor if tensor.dtype is dtype else TO[dtype](tensor)


def within(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in its own dtype, with finite values beyond `dtype` moved to that dtype's finite extremes (R12). Infinities stay."""
    limit = FINITE_MAX[dtype]
    if not _may_lose(tensor, dtype):
        return tensor
    return _where(_isinf(tensor), tensor, _clamp(tensor, -limit, limit))


def _may_lose(tensor: Tensor, dtype: torch.dtype) -> bool:
    # sparse and nested tensors have no clamp, and are no masks
    return FINITE_MAX[tensor.dtype] > FINITE_MAX[dtype] and tensor.layout is torch.strided and not tensor.is_nested


def cast_saturating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, finite values staying finite, when it needs no gradient (a mask); else the plain cast."""
    return cast(tensor if tensor.requires_grad else within(tensor, dtype), dtype)


def cast_finite(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, finite values staying finite, whether it needs a gradient or not (scores with a mask added)."""
    low = cast(tensor, dtype)
    if not _may_lose(tensor, dtype):
        return low
    # in this order backward keeps one bool an element; a clamp would keep the wide tensor
    made_infinite = _and(_isinf(low), _not(_isinf(tensor)))
    return _where(made_infinite, _clamp(_detach(low), -FINITE_MAX[dtype], FINITE_MAX[dtype]), low)


def cast_saturating_0dim(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain cast, but saturating for a 0-dim tensor: a mask's value, times zero, must not become NaN."""
    return cast(tensor, dtype) if tensor.dim() else cast_saturating(tensor, dtype)


def finite_scalar(value: Any, dtype: torch.dtype) -> Any:
    """`value`, or the finite extreme of `dtype` when `value` is a finite Python number beyond it."""
    return (FINITE_MAX[dtype] if value > 0 else -FINITE_MAX[dtype]) if overflows(value, dtype) else value


def overflows(value: object, dtype: torch.dtype) -> bool:
    """Whether `value` is a finite number of Python's or numpy's beyond `dtype`."""
    return isinstance(value, numbers.Real) and FINITE_MAX[dtype] < abs(float(value)) < float("inf")


def each_tensor(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among `values` and inside their lists, tuples and dicts, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from each_tensor(value)
        elif isinstance(value, dict):
            yield from each_tensor(value.values())


def each_castable(values: Iterable[Any]) -> Iterator[Tensor]:
    """The castable tensors among `values`, in order."""
    return filter(castable, each_tensor(values))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function(tensor)` in the place of every tensor in it; a list, tuple or dict in which nothing changes is itself.

    What holds them keeps its type.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else _of_type(value, items)
    if isinstance(value, dict):
        found = {key: map_tensors(item, function) for key, item in value.items()}
        if all(found[key] is item for key, item in value.items()):
            return value
        copied = found if type(value) is dict else copy.copy(value)  # a subclass may have a constructor of its own
        for key, item in found.items():
            copied[key] = item  # and attributes that follow its items: what models of transformers give has no update()
        return copied
    return value


def _of_type(value: Any, items: list[Any]) -> Any:
    """A list or tuple as `value` is one, of these items."""
    if type(value) is list:
        return items
    if isinstance(value, list):
        copied = copy.copy(value)  # a subclass of list may have a constructor of its own
        copied[:] = items
        return copied
    if hasattr(value, "_fields"):
        return type(value)(*items)
    # what torch.aminmax returns is made by its class alone; another subclass of tuple may have a constructor of its own
    return type(value)(items) if hasattr(value, "n_fields") else tuple.__new__(type(value), items)


def cast_within(value: Any, dtype: torch.dtype, caster: Caster) -> Any:
    """`value` with every castable tensor in it cast; see `map_tensors` for what holds them."""
    if isinstance(value, Tensor):
        return caster(value, dtype) if value.dtype is not dtype and castable(value) else value
    if isinstance(value, (list, tuple, dict)):
        return map_tensors(value, lambda t: caster(t, dtype) if t.dtype is not dtype and castable(t) else t)
    return value


def cast_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    caster: Caster,
    keep: frozenset[int | str] = frozenset(),
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with every castable tensor in `dtype`, save those at the positions or keywords in `keep`."""
    return (
        [a if i in keep else cast_within(a, dtype, caster) for i, a in enumerate(args)],
        {k: a if k in keep else cast_within(a, dtype, caster) for k, a in kwargs.items()},
    )


def widest(tensors: Iterable[Tensor], *, count_0dim: bool) -> torch.dtype:
    """The dtype that all of `tensors`, one or more, fit in: bf16 with fp16 gives float32.

    0-dim tensors do not widen tensors that have dimensions unless `count_0dim` (R3; torch's own rule).
    """
    tensors = list(tensors)
    counted = tensors if count_0dim else [t for t in tensors if t.dim()] or tensors
    return functools.reduce(torch.promote_types, (t.dtype for t in counted))
