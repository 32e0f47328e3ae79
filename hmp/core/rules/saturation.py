"""Finite scalars and masks beyond the range of a low-precision dtype stay finite in fills, bounds, sums and products (R12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import casting
from ..casting import FINITE_MAX, Caster, Tensor, cast_call, castable, deliver, each_castable
from ..torch_ops import op_facts, sites
from . import refusals
from .op_rule import Op, OpRule, survey

_SMALLEST_LIMIT = FINITE_MAX[torch.float16]
_Parameter = torch.nn.Parameter
_clone = torch.clone  # torch's own, taken before anything is patched
_PLAIN = frozenset({Tensor, _Parameter})


def is_arithmetic(rule: OpRule) -> bool:
    """Return True if the op computes in float32 where a scalar is beyond the low-precision dtype."""
    return rule.op in op_facts.ARITHMETIC


def fills(rule: OpRule) -> bool:
    """Return True if a scalar beyond the low-precision dtype becomes that dtype's extreme."""
    return sites.base_of(rule.op) in (*op_facts.FILLS, "index_put")  # x[m] = s by another name


def takes_scores(rule: OpRule) -> bool:
    """Return True if the op's input may be scores with a mask added."""
    return not rule.facts.users and not op_facts.SCORE_TAKERS.isdisjoint(sites.ancestry(rule.op))


def takes_masks(rule: OpRule) -> bool:
    """Return True if a tensor that the op is given may be a mask, or scores with one added: finite values stay finite in its casts."""
    return takes_scores(rule) or sites.base_of(rule.op) in op_facts.MASK_TAKERS


def caster(rule: OpRule) -> Caster:
    """Return the function that casts the tensors of the rule's op: where these may be masks, finite values stay finite."""
    if takes_scores(rule):
        return casting.cast_finite
    if takes_masks(rule):
        return casting.cast_saturating
    return casting.cast_saturating_0dim if is_arithmetic(rule) else casting.cast


def mask_in_place_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return a function that adds a mask or a scalar in place to low-dtype scores, which stay finite (R12); torch computes others."""

    def general(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not castable(self) or self.dtype is torch.float32:
            return op(self, *args, **kwargs)
        masks = tuple(written_value(a, self.dtype) for a in args)
        named = {name: written_value(a, self.dtype) for name, a in kwargs.items()}
        if overflowing(args, kwargs, self.dtype):
            return _saturated_in_place(op, self, masks, named)
        return op(self, *masks, **named)

    any_call = refusals.or_uncast(general, op)

    def mask_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_wide = type(self) in _PLAIN and self.dtype is torch.float32
        return op(self, *args, **kwargs) if is_wide else any_call(self, *args, **kwargs)

    return mask_in_place


def fill_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return a function that calls `op` with each finite fill or bound beyond the tensor's dtype moved to its extreme (R12)."""

    def fill(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        if dtype is None:
            tensors = list(each_castable((*args, *kwargs.values())))
            filled = [t for t in tensors if t.dim()] or tensors
            if not filled:
                return op(*args, **kwargs)
            dtype = filled[0].dtype if rule.op != "where" else casting.widest(filled, count_0dim=False)
        if dtype in FINITE_MAX and dtype is not torch.float32:
            args, kwargs = bounded(args, kwargs, dtype)
            args = tuple(scalar(a, dtype) for a in args)
            kwargs = {k: scalar(a, dtype) for k, a in kwargs.items()}
        return op(*args, **kwargs)

    return fill


def guard_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return a function for unlisted arithmetic in which `(1 - mask) * finfo(float32).min` stays finite in a low-precision dtype (R12)."""

    def general(*args: Any, **kwargs: Any) -> Any:
        tensors = survey(args, kwargs, rule)
        dtype = casting.widest(tensors, count_0dim=False) if tensors else None
        if tensors and dtype is not None and dtype is not torch.float32 and overflowing(args, kwargs, dtype):
            return _guarded(op, rule, args, kwargs, dtype, tensors)
        return op(*args, **kwargs)

    any_call = refusals.or_uncast(general, op)

    def guard(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and _PLAIN.issuperset(map(type, args)):
            return op(*args)
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
        return any_call(*args, **kwargs)

    return guard


def _guarded(op: Op, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, tensors: Iterable[Tensor]) -> Any:
    """Return the finite result in `dtype` of a call with a scalar beyond it (R12), written in place (R5) or into `out` (R6) if asked."""
    if kwargs.get("out") is not None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
        return deliver(saturated(op, args, {n: v for n, v in kwargs.items() if n != "out"}, dtype), kwargs["out"])
    if rule.facts.in_place:
        return _saturated_in_place(op, args[0], args[1:], kwargs)
    return saturated(op, args, kwargs, dtype)


def _saturated_in_place(op: Op, first: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return `first` with the finite result of the in-place `op` written into it."""
    return first.copy_(saturated(op, (_clone(first), *args), kwargs, first.dtype))


def overflowing(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return True if an argument is a finite scalar beyond `dtype`."""
    return any(casting.overflows(value, dtype) for value in (*args, *kwargs.values()))


def saturated(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the result of the op computed in float32, with finite values moved inside `dtype` and then cast to it (R12)."""
    cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, casting.cast)
    result = op(*cast_args, **cast_kwargs)
    if not castable(result):
        return result
    try:
        return casting.cast(casting.within(result, dtype), dtype)
    except refusals.OF_CASTS as error:
        if not refusals.is_cast_refusal(error, (result,)):
            raise
        return result  # the op has run: it is not called again


def bounded(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with each finite scalar beyond `dtype` moved to its finite extreme."""
    return (
        tuple(casting.finite_scalar(a, dtype) for a in args),
        {name: casting.finite_scalar(a, dtype) for name, a in kwargs.items()},
    )


def scores_in_explicit_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the positional arguments of softmax(scores, dim, dtype=low) with the scores in that dtype, finite values staying finite.

    Torch's own conversion makes masked rows infinite, and softmax makes NaN of those.
    """
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
    if dtype not in (torch.bfloat16, torch.float16):
        return args
    return tuple(casting.cast_finite(a, dtype) if castable(a) and a.dtype is not dtype else a for a in args)


def written_value(value: Any, dtype: torch.dtype) -> Any:
    """Return a castable tensor that needs no gradient with the extremes of its dtype moved inside `dtype`; any other value itself."""
    return casting.without_extremes(value, dtype) if castable(value) and not value.requires_grad else value


def scalar(value: Any, dtype: torch.dtype) -> Any:
    """Return a 0-dim castable tensor that needs no gradient with a finite value moved inside `dtype`; any other value itself."""
    return casting.within(value, dtype) if castable(value) and value.dim() == 0 and not value.requires_grad else value
