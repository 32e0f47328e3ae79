"""Casts of tensors, and of the tensors inside lists, tuples and dicts. This module knows no ops and keeps no state."""

from __future__ import annotations

import copy
import functools
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch

from .torch_private import MKLDNN as MKLDNN
from .torch_private import dispatch_modes as _dispatch_modes
from .torch_private import in_plain_autograd, is_only_heard, without_dispatch_modes

Tensor = torch.Tensor
Caster = Callable[[Tensor, torch.dtype], Tensor]

LOW = (torch.bfloat16, torch.float16)
CASTABLE = frozenset({torch.float32, *LOW})
# An op with an input of one of these dtypes is left to torch.
LEFT_TO_TORCH = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
FINITE_MAX = {dtype: torch.finfo(dtype).max for dtype in CASTABLE}

_compiling = torch.compiler.is_dynamo_compiling
_to_float32 = Tensor.float
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")  # from torch 2.12 on


class _Widened(torch.autograd.Function):
    """A cast to float32 whose gradient is not rounded to the dtype of what was cast."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _to_float32(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def has_float32_gradient(tensor: Tensor) -> bool:
    """Return True if a low-precision weight asks for a float32 gradient, by `weight.grad_dtype`."""
    if not HAS_GRAD_DTYPE or not tensor.requires_grad or tensor.dtype is torch.float32 or _compiling() or not tensor.is_leaf:
        return False
    return tensor.grad_dtype is torch.float32 and in_plain_autograd()


def widened(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32."""
    return _Widened.apply(tensor) if has_float32_gradient(tensor) else _to_float32(tensor)  # type: ignore[no-untyped-call]


# torch's own methods, taken before anything is patched. x.bfloat16() takes 0.6 of the time of x.to(torch.bfloat16).
TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: _to_float32,
    torch.bfloat16: torch.Tensor.bfloat16,
    torch.float16: torch.Tensor.half,
}
_aminmax, _and, _clamp, _isinf, _not = torch.aminmax, torch.logical_and, torch.clamp, torch.isinf, torch.logical_not
_where, _detach, _dispatch, _alias_copy = torch.where, Tensor.detach, Tensor.__torch_dispatch__, torch.alias_copy


# Other words for a dtype.
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.": "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(given: object, among: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype among these that is given, or named, as "torch.float16", "float16", "fp16" or "half"; None for another one."""
    name = given.removeprefix("torch.") if isinstance(given, str) else ""
    return next((dtype for dtype in among if given is dtype or _WORDS.get(name, name) == dtype_name(dtype)), None)


def castable(value: object) -> TypeGuard[Tensor]:
    """Return True if `value` is a dense or sparse float32, bfloat16 or float16 tensor."""
    try:
        return isinstance(value, Tensor) and value.dtype in CASTABLE and value.layout is not MKLDNN
    except NotImplementedError:  # of torch's masks for attention, before torch 2.9
        return False


def left_to_torch(tensor: Tensor) -> bool:
    """Return True if an op with this input is left to torch: it is float64 or complex, or its class refuses what a cast asks of it.

    torch.nn.utils has such a class, for the weights of per-sample gradients.
    """
    if type(tensor) is Tensor:
        return tensor.dtype in LEFT_TO_TORCH
    try:
        return tensor.dtype in LEFT_TO_TORCH or tensor.layout is None
    except RuntimeError:
        return True


def has_values(tensor: Tensor) -> bool:
    """Return True if torch's kernels compute on the tensor: it is not on the meta device, and its class has no `__torch_dispatch__`."""
    return not tensor.is_meta and type(tensor).__torch_dispatch__ is _dispatch


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`; itself where it has that dtype. Differentiable: the gradient arrives in the tensor's own dtype."""
    if tensor.dtype is dtype:
        return tensor
    # called in one line: torch.jit compares the lines of a trace made with gradients with those of one made without
    to: Any = _Widened.apply if dtype is torch.float32 and has_float32_gradient(tensor) else TO[dtype]
    return to(tensor)  # type: ignore[no-any-return]


def within(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor`, in its own dtype, with finite values beyond the range of `dtype` clamped to that range. Infinities stay."""
    limit = FINITE_MAX[dtype]
    if _fits(tensor, dtype):  # most masks do
        return tensor
    inside = _clamp(tensor, -limit, limit) if tensor.dtype in CASTABLE else _clamp(tensor, -int(limit), int(limit))
    return _where(_isinf(tensor), tensor, inside)


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return True if no finite value of the tensor is known to be beyond the range of `dtype`, or if none can be moved inside.

    Sparse and nested tensors have no clamp; they aren't attention masks either. On the meta device there are no values, and clamp is Python
    code that calls torch.where, which may be what asks here.
    """
    limit = FINITE_MAX[dtype]
    largest = FINITE_MAX[tensor.dtype] if tensor.dtype in CASTABLE else torch.iinfo(tensor.dtype).max
    if largest <= limit or not is_dense(tensor):
        return True
    least, most = bounds(tensor)
    return -limit <= least and most <= limit


def is_dense(tensor: Tensor) -> bool:
    """Return True if the tensor has a value for each element: it is neither sparse nor nested, nor on the meta device."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def bounds(tensor: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value, both NaN where a value is; infinities where code may not depend on the values.

    A device would be waited for, and a trace, a transform and the dispatch modes of others may use the call again with other values. hmp's
    own mode only listens, and is not to change what runs.

    One op that asks is quicker than those that clamp, and where a gradient is needed it saves their memory, too.
    """
    if _dispatch_modes() and is_only_heard():
        with without_dispatch_modes():
            return bounds(tensor)
    if type(tensor) is not Tensor or not tensor.is_cpu or _compiling() or _dispatch_modes() or not in_plain_autograd():
        return -math.inf, math.inf
    if not tensor.numel():
        return 0.0, 0.0
    least, most = _aminmax(_detach(tensor))  # a thirteenth of the time of linalg.vector_norm(ord=inf)
    return float(least), float(most)


def cast_saturating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`. Where it needs no gradient (a mask), finite values stay finite; otherwise the plain cast."""
    return cast(tensor if tensor.requires_grad else within(tensor, dtype), dtype)


def cast_finite(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype` with finite values staying finite, with or without a gradient: for scores with a mask added."""
    return cast(tensor, dtype) if _fits(tensor, dtype) else cast_sum(tensor, [tensor], dtype)


def cast_sum(result: Tensor, operands: list[Any], dtype: torch.dtype) -> Tensor:
    """Return a float32 sum in `dtype`, in which finite operands have finite sums.

    So have masks of the lowest float32, whose sum is infinite in float32, too.
    """
    low = cast(result, dtype)
    least, most = bounds(_detach(low))
    if -math.inf < least and most < math.inf:
        return low
    # cast first, then repaired: backward saves one bool an element, where a clamp before the cast would save the float32 tensor
    overflowed = _isinf(_detach(low))
    for operand in operands:
        if isinstance(operand, Tensor):
            overflowed = _and(overflowed, _not(_isinf(_detach(operand))))
        elif isinstance(operand, numbers.Real) and math.isinf(operand):
            return low
    return _where(overflowed, _clamp(_detach(low), -FINITE_MAX[dtype], FINITE_MAX[dtype]), low)


def cast_saturating_0dim(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`; `cast_saturating` where it is 0-dim, for `mask * value`: an infinite value times 0 would be NaN."""
    return cast(tensor, dtype) if tensor.dim() else cast_saturating(tensor, dtype)


def finite_scalar(value: Any, dtype: torch.dtype) -> Any:
    """Return `value`, or the finite extreme of `dtype` where `value` is a finite number beyond its range."""
    return (FINITE_MAX[dtype] if value > 0 else -FINITE_MAX[dtype]) if overflows(value, dtype) else value


def overflows(value: object, dtype: torch.dtype) -> bool:
    """Return True if `value` is a finite real number, Python's, numpy's or a symbolic one, beyond the range of `dtype`."""
    # a guard of compiled code takes any number to be less than infinity
    return (number := real(value)) is not None and FINITE_MAX[dtype] < abs(number) <= sys.float_info.max


def real(value: object) -> Any:
    """Return a real number as one that compares as Python's do; None for anything else.

    A symbolic one of compiled code stays itself, so that what is asked of it becomes a guard: float() would make it a constant.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value if value.node.has_hint() else None
    return float(value) if isinstance(value, numbers.Real) else None


def each_tensor(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values` and inside lists, tuples and dicts among them, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from each_tensor(value)
        elif isinstance(value, dict):
            yield from each_tensor([item for _, item in value.items()])  # as `map_tensors` reads it: a subclass may have other values()


def each_castable(values: Iterable[Any]) -> Iterator[Tensor]:
    """Return the castable ones of `each_tensor(values)`, in order."""
    return filter(castable, each_tensor(values))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], others: Callable[[Any], Any] | None = None) -> Any:
    """Return `value` with every tensor in it replaced by `function(tensor)`. A container in which nothing changes is returned itself.

    Goes into lists, tuples and dicts; new ones keep their class. Any other value is replaced by `others(it)`, if that is given.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function, others) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else _of_type(value, items)
    if isinstance(value, dict):
        found = {key: map_tensors(item, function, others) for key, item in value.items()}
        if all(found[key] is item for key, item in value.items()):
            return value
        copied = found if type(value) is dict else copy.copy(value)  # a subclass may have a constructor of its own
        for key, item in found.items():
            copied[key] = item  # and attributes that follow its items: what models of transformers give has no update()
        return copied
    return value if others is None else others(value)


def _of_type(value: Any, items: list[Any]) -> Any:
    """Return a list or tuple of the class of `value` with these items."""
    if type(value) is list:
        return items
    if isinstance(value, list):
        copied = copy.copy(value)  # a subclass of list may have a constructor of its own
        copied[:] = items
        return copied
    if hasattr(value, "_fields"):
        return type(value)(*items)
    # a torch.return_types class (it has n_fields) must be called; other subclasses of tuple may have a constructor of their own
    return type(value)(items) if hasattr(value, "n_fields") else tuple.__new__(type(value), items)


def cast_within(value: Any, dtype: torch.dtype, caster: Caster) -> Any:
    """Return `value` with every castable tensor in it cast by `caster`; `map_tensors` says what it goes into."""
    if isinstance(value, Tensor):
        return caster(value, dtype) if value.dtype is not dtype and castable(value) else value
    if isinstance(value, (list, tuple, dict)):
        return map_tensors(value, lambda t: caster(t, dtype) if t.dtype is not dtype and castable(t) else t)
    return value


def cast_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype, caster: Caster, keep: frozenset[int | str] = frozenset()
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with every castable tensor cast to `dtype`, except those whose position or keyword is in `keep`."""
    by_position = [a if i in keep else cast_within(a, dtype, caster) for i, a in enumerate(args)]
    return by_position, {k: a if k in keep else cast_within(a, dtype, caster) for k, a in kwargs.items()}


def widest(tensors: Iterable[Tensor], *, count_0dim: bool) -> torch.dtype:
    """Return the dtype that torch promotes `tensors`, at least one, to: bfloat16 with float16 gives float32.

    Unless `count_0dim` is given, 0-dim tensors do not count if others have dimensions (torch's own rule).
    """
    tensors = list(tensors)
    counted = tensors if count_0dim else [t for t in tensors if t.dim()] or tensors
    return functools.reduce(torch.promote_types, (t.dtype for t in counted))


# --- into `out=` ----------------------------------------------------------------------------------------------------------


def write_out(result: Any, out: Any) -> Any:
    """Write `result` into `out`, a tensor or one tensor for each of the result's, and return what torch returns for `out=`."""
    if isinstance(out, Tensor):
        return _into(result, out)
    places = [_into(part, place) for part, place in zip(result, out, strict=True)]
    named = getattr(torch.return_types, type(result).__name__ + "_out", None)
    return out if named is None else named(places)


def _into(result: Tensor, out: Tensor) -> Tensor:
    with torch.no_grad():
        value = cast(result, out.dtype) if castable(result) and castable(out) else result
        _alias_copy(value, out=out)
    return out
