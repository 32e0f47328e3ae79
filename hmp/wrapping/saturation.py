"""R12: finite scalars and masks beyond a low dtype stay finite, in fills, bounds, sums and products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..casting import FINITE_MAX, Tensor, cast_call, castable, deliver, each_castable, tensor_casts
from . import refusals
from .op_rule import Op, OpRule, survey

_SMALLEST_LIMIT = FINITE_MAX[torch.float16]
_Parameter = torch.nn.Parameter
_clone = torch.clone  # torch's own, taken before anything is patched


def mask_in_place_wrapper(op: Op) -> Op:
    """R12: a mask or a scalar that is added in place to low-dtype scores leaves them finite; torch computes the rest."""

    def mask_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        if castable(self) and self.dtype is not torch.float32:
            try:
                masks, named = tuple(mask(a, self.dtype) for a in args), {name: mask(a, self.dtype) for name, a in kwargs.items()}
                if overflowing(args, kwargs, self.dtype):
                    return _saturated_in_place(op, self, masks, named)
            except (TypeError, NotImplementedError) as error:
                if not refusals.is_of_a_cast(error, (self, *args, kwargs)):
                    raise
            else:
                return op(self, *masks, **named)
        return op(self, *args, **kwargs)

    return mask_in_place


def fill_wrapper(op: Op, rule: OpRule) -> Op:
    """R12: a finite fill or bound beyond the tensor's dtype becomes that dtype's finite extreme."""

    def fill(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        if dtype is None:
            tensors = list(each_castable((*args, *kwargs.values())))
            filled = [t for t in tensors if t.dim()] or tensors
            if not filled:
                return op(*args, **kwargs)
            dtype = filled[0].dtype if rule.op != "where" else tensor_casts.widest(filled, count_0dim=False)
        if dtype in FINITE_MAX and dtype is not torch.float32:
            args, kwargs = bounded(args, kwargs, dtype)
            args = tuple(mask(a, dtype) if isinstance(a, Tensor) and a.dim() == 0 else a for a in args)
            kwargs = {k: mask(a, dtype) if isinstance(a, Tensor) and a.dim() == 0 else a for k, a in kwargs.items()}
        return op(*args, **kwargs)

    return fill


def guard_wrapper(op: Op, rule: OpRule) -> Op:
    """R12 for unlisted multiplication: `(1 - mask) * finfo(float32).min` stays finite in a low dtype.

    That no scalar is large a builtin's switch has seen of what comes through it; regions beside the casts in focus come without.
    """

    def guard(*args: Any, **kwargs: Any) -> Any:
        for a in args:
            kind = type(a)
            if kind is float or kind is int:
                if not -_SMALLEST_LIMIT <= a <= _SMALLEST_LIMIT:
                    break
            elif kind is not Tensor and kind is not _Parameter:
                break
        else:
            if not kwargs:
                return op(*args)
        tensors = survey(args, kwargs, rule)
        dtype = tensor_casts.widest(tensors, count_0dim=False) if tensors else None
        if dtype is not None and dtype is not torch.float32 and overflowing(args, kwargs, dtype):
            try:
                return _guarded(op, rule, args, kwargs, dtype, tensors or ())
            except (TypeError, NotImplementedError) as error:
                if not refusals.is_of_a_cast(error, (args, kwargs)):
                    raise
        return op(*args, **kwargs)

    return guard


def _guarded(op: Op, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, tensors: Iterable[Tensor]) -> Any:
    """R12: the call, whose scalar is beyond `dtype`, with a finite result in that; R5 and R6 for where it is written."""
    if kwargs.get("out") is not None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
        return deliver(saturated(op, args, {n: v for n, v in kwargs.items() if n != "out"}, dtype), kwargs["out"])
    if rule.kind == "guard":
        return saturated(op, args, kwargs, dtype)
    return _saturated_in_place(op, args[0], args[1:], kwargs)


def _saturated_in_place(op: Op, first: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return first.copy_(saturated(op, (_clone(first), *args), kwargs, first.dtype))


def overflowing(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    return any(tensor_casts.overflows(value, dtype) for value in (*args, *kwargs.values()))


def saturated(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The op computed in float32, finite results moved inside the low dtype (R12)."""
    cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, tensor_casts.cast)
    result = op(*cast_args, **cast_kwargs)
    if not castable(result):
        return result
    try:
        return tensor_casts.cast(tensor_casts.within(result, dtype), dtype)
    except (TypeError, NotImplementedError) as error:
        if not refusals.is_of_a_cast(error, (result,)):
            raise
        return result


def bounded(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (
        tuple(tensor_casts.finite_scalar(a, dtype) for a in args),
        {name: tensor_casts.finite_scalar(a, dtype) for name, a in kwargs.items()},
    )


def scores_in_explicit_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of softmax(scores, dim, dtype=low) with the scores in that dtype, finite values staying finite: torch's own
    conversion makes whole rows of masks infinite, and NaN of them."""
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
    if dtype not in (torch.bfloat16, torch.float16):
        return args
    return tuple(tensor_casts.cast_finite(a, dtype) if castable(a) and a.dtype is not dtype else a for a in args)


def mask(value: Any, dtype: torch.dtype) -> Any:
    """A castable operand that needs no gradient, its finite values inside `dtype`; anything else as it is."""
    return tensor_casts.within(value, dtype) if castable(value) and not value.requires_grad else value
