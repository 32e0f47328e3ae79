"""Finite scalars and masks beyond the range of a low-precision dtype stay finite in fills, bounds, sums and products (R12)."""

from __future__ import annotations

import math
import numbers
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
# torch's own, taken before anything is patched
_clone, _copy, _detach, _expand = torch.clone, Tensor.copy_, Tensor.detach, Tensor.expand
_and, _clamp, _eq, _isinf, _le, _ne = torch.logical_and, torch.clamp, torch.eq, torch.isinf, torch.le, torch.ne
_count_nonzero, _max, _min, _minimum, _mul = torch.count_nonzero, torch.max, torch.min, torch.minimum, torch.mul
_neg, _not, _sum_of, _where = torch.neg, torch.logical_not, torch.sum, torch.where
_float32, _strided = torch.float32, torch.strided
_grad_enabled, _compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
# Half a unit in the last place of each dtype's largest number: what is smaller takes no finite number to infinity when it is added.
_HARMLESS = {torch.float16: 16.0, torch.bfloat16: 2.0**119}
_HARMLESS_NUMBERS = {**_HARMLESS, torch.float32: math.inf}
_UNKNOWN = -math.inf, math.inf
_PLAIN = frozenset({Tensor, _Parameter})


def is_arithmetic(rule: OpRule) -> bool:
    """Return True if the op computes in float32 where a scalar is beyond the low-precision dtype."""
    return rule.op in op_facts.ARITHMETIC


def fills(rule: OpRule) -> bool:
    """Return True if a scalar beyond the low-precision dtype becomes that dtype's extreme."""
    return sites.base_of(rule.op) in (*op_facts.FILLS, "index_put")  # x[m] = s by another name


def is_sum(rule: OpRule) -> bool:
    """Return True if the op may add a mask to scores in a low-precision dtype."""
    return sites.base_of(rule.op) in op_facts.SUMS and rule.dtype is not torch.float32


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
    if is_sum(rule):
        return casting.cast  # finite_sum() has looked at the values
    if takes_masks(rule):
        return casting.cast_saturating
    return casting.cast_saturating_0dim if is_arithmetic(rule) else casting.cast


def mask_in_place_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return a function that adds a mask or a scalar in place to low-dtype scores, which stay finite (R12); torch computes others."""

    def general(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not castable(self) or self.dtype is torch.float32:
            return op(self, *args, **kwargs)
        return finite_sum(op, rule, None, (self, *args), kwargs, self.dtype)

    usual = sum_wrapper(op, rule, refusals.or_uncast(general, op))

    def mask_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_wide = type(self) in _PLAIN and self.dtype is torch.float32
        return op(self, *args, **kwargs) if is_wide else usual(self, *args, **kwargs)

    return mask_in_place


def sum_wrapper(op: Op, rule: OpRule, any_call: Op) -> Op:
    """Return a function for sums: those of two plain tensors that aren't masks are left to torch here, others to `any_call`."""
    dtypes = casting.CASTABLE if rule.dtype is None else {rule.dtype}

    def finite(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 2 or type(args[0]) is not Tensor:
            return any_call(*args, **kwargs)
        a, b = args
        dtype, kind = a.dtype, type(b)
        if dtype not in dtypes:
            return any_call(a, b)
        if kind is Tensor:
            if b.dtype is dtype:
                if dtype is _float32:
                    return op(a, b)
                if a.requires_grad:
                    if b.requires_grad and a.layout is _strided:
                        return op(a, b)
                elif a.is_contiguous() and b.is_contiguous() and not b.requires_grad:
                    larger = a.numel() - b.numel()
                    if larger == 0 or (a.is_cpu and not _is_large(_bounds(b if larger > 0 else a), dtype)):
                        return op(a, b)
        elif (kind is float or kind is int) and -_HARMLESS_NUMBERS[dtype] < b < _HARMLESS_NUMBERS[dtype]:
            return op(a, b)
        return any_call(a, b)

    return finite


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
    if is_sum(rule):
        return sum_wrapper(op, rule, refusals.or_uncast(_unlisted_sum(op, rule), op))

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


def _unlisted_sum(op: Op, rule: OpRule) -> Op:
    def unlisted_sum(*args: Any, **kwargs: Any) -> Any:
        tensors, out = survey(args, kwargs, rule), kwargs.get("out")
        if not tensors:
            return op(*args, **kwargs)
        dtype = out.dtype if castable(out) else casting.widest(tensors, count_0dim=False)
        if dtype is torch.float32:
            return op(*args, **kwargs)
        if out is None:
            return finite_sum(op, rule, None, args, kwargs, dtype)
        return _guarded(op, rule, args, kwargs, dtype, tensors) if overflows(rule, args, kwargs, dtype) else op(*args, **kwargs)

    return unlisted_sum


def _guarded(op: Op, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, tensors: Iterable[Tensor]) -> Any:
    """Return the finite result in `dtype` of a call with a scalar beyond it (R12), written in place (R5) or into `out` (R6) if asked."""
    if kwargs.get("out") is not None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
        return deliver(saturated(op, rule, args, {n: v for n, v in kwargs.items() if n != "out"}, dtype), kwargs["out"])
    if rule.facts.in_place:
        return _saturated_in_place(op, rule, args[0], args[1:], kwargs)
    return saturated(op, rule, args, kwargs, dtype)


def _saturated_in_place(op: Op, rule: OpRule, first: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return `first` with the finite result of the in-place `op` written into it."""
    return first.copy_(saturated(op, rule, (_clone(first), *args), kwargs, first.dtype))


# --- sums of scores and masks ---------------------------------------------------------------------------------------------


def finite_sum(op: Op, rule: OpRule, caster: Caster | None, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the sum in `dtype`, a low-precision one: where an operand is a mask, finite values have a finite sum (R12).

    `caster` casts the operands; None leaves that to torch. In place (R5) the sum is written into the first operand.
    """
    if overflowing(args, kwargs, dtype):
        return _sum_in_float32(op, rule, args, kwargs, dtype)
    operands, ranges = _ranges(args, kwargs, dtype)
    large = [_is_large(found, dtype) for found in ranges]
    if not any(large):
        return _sum(op, caster, args, kwargs, dtype)
    at = 1 if large[-1] else 0  # where the mask is
    known, signs = ranges[at], (-1, 1) if rule.op == "rsub" else (1, -1) if sites.base_of(rule.op) in ("sub", "subtract") else (1, 1)
    scores, mask = args[1 - at] if len(args) == 2 else None, operands[at]
    if kwargs or known == _UNKNOWN or type(scores) is not Tensor or signs[1 - at] < 0:
        return _sum_in_float32(op, rule, args, kwargs, dtype)
    if scores.dtype is not dtype:
        if caster is None or not castable(scores):
            return _sum_in_float32(op, rule, args, kwargs, dtype)
        scores = caster(scores if scores.requires_grad else casting.within(scores, dtype), dtype)
    assert known is not None
    least, most = known if signs[at] > 0 else (-known[1], -known[0])
    into = args[0] if rule.facts.in_place else None
    fits_into = into is None or torch.broadcast_shapes(into.shape, scores.shape, getattr(mask, "shape", ())) == into.shape
    if isinstance(mask, Tensor) and castable(mask) and most <= 0 and casting.is_readable(scores) and fits_into:
        cap = _cap(mask if signs[at] > 0 else _neg(mask), least, dtype)
        if cap is not None:
            return _capped(scores, cap, into)
    if _fits(scores, least, most, dtype):
        return _sum(op, caster, args, kwargs, dtype)
    return _sum_in_float32(op, rule, args, kwargs, dtype)


def _sum(op: Op, caster: Caster | None, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    if caster is None:
        return op(*args, **kwargs)
    cast_args, cast_kwargs = cast_call(args, kwargs, dtype, caster)
    return op(*cast_args, **cast_kwargs)


def _sum_in_float32(op: Op, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    if rule.facts.in_place:
        return _saturated_in_place(op, rule, args[0], args[1:], kwargs)
    return saturated(op, rule, args, kwargs, dtype)


def _has_values(tensor: Tensor) -> bool:
    return casting.is_dense(tensor) and not tensor.is_meta


def overflows(rule: OpRule, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return True if arithmetic has to saturate in `dtype`: with a scalar beyond it, or in a sum with a mask that may go beyond it."""
    if overflowing(args, kwargs, dtype):
        return True
    return is_sum(rule) and any(_is_large(found, dtype) for found in _ranges(args, kwargs, dtype)[1])


def _ranges(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[list[Any], list[tuple[float, float] | None]]:
    """Return the operands of a sum, and the range of each that may be a mask."""
    operands = _operands(args, kwargs)
    return operands, [_range(value, operands, dtype) for value in operands]


def _operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [value for name, value in (*enumerate(args), *kwargs.items()) if name not in ("alpha", "out")]


def _is_large(found: tuple[float, float] | None, dtype: torch.dtype) -> bool:
    return found is not None and not (-_HARMLESS[dtype] < found[0] and found[1] < _HARMLESS[dtype])


def _range(value: Any, operands: list[Any], dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the smallest and the largest value of an operand that may be a mask; None for any other.

    A mask is a number, or a tensor that needs no gradient and that the sum casts or broadcasts, or whose sum with scores needs one. Others
    are ordinary operands: to look at the values of those would take as long as to add them.
    """
    if not isinstance(value, Tensor):
        return (float(value), float(value)) if isinstance(value, numbers.Real) else None
    is_number = value.dtype in casting.CASTABLE or value.dtype in casting.INTEGERS
    if value.requires_grad or not is_number or not _has_values(value):
        return None
    if value.dtype is dtype:
        if not value.is_cpu and not _compiling():
            return None  # a device would be waited for, or each such sum be computed in float32
        others = [each for each in operands if each is not value and isinstance(each, Tensor)]
        differs = any(each.numel() > value.numel() or (each.requires_grad and _grad_enabled()) for each in others)
        if not differs and 0 not in value.stride():
            return None
    return _bounds(value)


def _bounds(value: Tensor) -> tuple[float, float]:
    found = casting.bounds(value)
    return _UNKNOWN if found is None else found


def _cap(mask: Tensor, least: float, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor of which the minimum with the scores is their sum with `mask`, saturated; None where there is no such tensor.

    There is one if each value of the mask is 0 or takes every score to the extreme: one op then adds and saturates. A score of +inf
    becomes the extreme there, too.
    """
    largest = 2 * FINITE_MAX[dtype] if dtype is torch.float16 else FINITE_MAX[dtype]
    if least > -largest:
        return None
    takes_all = _le(mask, -largest)
    if int(_sum_of(takes_all)) != int(_count_nonzero(mask)):
        return None
    return casting.cast(_where(takes_all, -FINITE_MAX[dtype] if least > -math.inf else casting.within(mask, dtype), math.inf), dtype)


def _capped(scores: Tensor, cap: Tensor, into: Tensor | None) -> Tensor:
    needs_grad = scores.requires_grad and _grad_enabled()
    if into is not None and not needs_grad:
        return _minimum(scores, cap, out=into)
    if needs_grad:
        scores = _expand(scores, torch.broadcast_shapes(scores.shape, cap.shape))
    result: Tensor = _Capped.apply(scores, cap) if needs_grad else _minimum(scores, cap)  # type: ignore[no-untyped-call]
    return result if into is None else _copy(into, result)


class _Capped(torch.autograd.Function):
    """The minimum of scores and a cap that broadcasts to their shape: unlike torch's, its backward saves the cap alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, cap: Tensor) -> Tensor:
        ctx.save_for_backward(cap)
        return _minimum(scores, cap)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (cap,) = ctx.saved_tensors
        return _mul(gradient, casting.cast(_eq(cap, math.inf), gradient.dtype)), None


def _fits(scores: Tensor, least: float, most: float, dtype: torch.dtype) -> bool:
    """Return True if the sum of the scores and of values from `least` to `most` is finite in `dtype`."""
    if not casting.is_readable(scores) or not scores.numel() or max(-least, most) > FINITE_MAX[dtype]:
        return False
    small, given = _HARMLESS[dtype], _detach(scores)
    end = FINITE_MAX[dtype] + small
    return (-small < least or float(_min(given)) + least > -end) and (most < small or float(_max(given)) + most < end)


def baddbmm_of_mask(op: Op) -> Op:
    """Return baddbmm with sums that stay finite where its first input is a mask (R12)."""

    def baddbmm(*args: Any, **kwargs: Any) -> Any:
        mask: Any = args[0] if args else kwargs.get("input")
        dtype = getattr(mask, "dtype", None)
        if dtype not in _HARMLESS or mask.requires_grad or not _has_values(mask):
            return op(*args, **kwargs)
        known = casting.bounds(mask)
        if known is not None and -_HARMLESS[dtype] < known[0] and known[1] < _HARMLESS[dtype]:
            return op(*args, **kwargs)
        adds: Tensor = _and(_ne(mask, 0), _not(_isinf(mask)))  # before the result may be written there
        result: Tensor = op(*args, **kwargs)
        inside = _clamp(_detach(result), -FINITE_MAX[dtype], FINITE_MAX[dtype])
        finite = _where(_and(_isinf(_detach(result)), adds), inside, result)
        return _copy(result, finite) if result is mask or result is kwargs.get("out") else finite

    return baddbmm


def choice_of_integers(op: Op) -> Op:
    """Return `where` or `masked_fill` with integers moved inside the low-precision dtype of the result: torch makes infinities of them."""

    def choice(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dtype in casting.INTEGERS:
                break
        else:
            return op(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if castable(each)]
        dtype = casting.widest(tensors, count_0dim=False) if tensors else torch.float32
        if dtype is torch.float32:
            return op(*args, **kwargs)
        return op(*(_within(each, dtype) for each in args), **{name: _within(each, dtype) for name, each in kwargs.items()})

    return choice


def _within(value: Any, dtype: torch.dtype) -> Any:
    return casting.within(value, dtype) if isinstance(value, Tensor) and value.dtype in casting.INTEGERS else value


SATURATING = {"baddbmm": baddbmm_of_mask, "where": choice_of_integers, "masked_fill": choice_of_integers}


# --- scalars, fills and bounds --------------------------------------------------------------------------------------------


def overflowing(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return True if an argument is a finite scalar beyond `dtype`."""
    return any(casting.overflows(value, dtype) for value in (*args, *kwargs.values()))


def saturated(op: Op, rule: OpRule, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the result of the op computed in float32, with finite values moved inside `dtype` and then cast to it (R12)."""
    cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, casting.cast)
    result = op(*cast_args, **cast_kwargs)
    if not castable(result):
        return result
    try:
        if is_sum(rule) and _has_values(result):
            return casting.cast_sum(result, _operands(args, kwargs), dtype)
        # a mask alone is clamped before the cast, in a fifth of the time; with a gradient that would save the float32 result
        return casting.cast_finite(result, dtype) if result.requires_grad else casting.cast_saturating(result, dtype)
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
    """Return a tensor that needs no gradient with finite values moved inside `dtype`; any other value itself."""
    return casting.within(value, dtype) if castable(value) and not value.requires_grad else value


def scalar(value: Any, dtype: torch.dtype) -> Any:
    """Return a 0-dim castable tensor that needs no gradient with a finite value moved inside `dtype`; any other value itself."""
    return casting.within(value, dtype) if castable(value) and value.dim() == 0 and not value.requires_grad else value
