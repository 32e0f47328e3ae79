"""Finite scalars and masks beyond the range of a low-precision dtype stay finite in fills, bounds and `+ - * /`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .. import casting
from ..casting import FINITE_MAX, Caster, Tensor, cast_call, castable
from ..observe import here
from ..ops import sites, table
from . import kernels
from .op import Op, OpUnderRule

# torch's own, taken before anything is patched
_and, _clamp, _detach, _isinf = torch.logical_and, torch.clamp, Tensor.detach, torch.isinf
_ne, _not, _where = torch.ne, torch.logical_not, torch.where
_grad_enabled, _compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
# Half a unit in the last place of each dtype's largest number: what is smaller takes no finite number to infinity when it is added.
HARMLESS = {torch.float16: 16.0, torch.bfloat16: 2.0**119, torch.float32: math.inf}


def is_arithmetic(ruled: OpUnderRule) -> bool:
    """Return True if the op computes in float32 where a scalar is beyond the low-precision dtype."""
    return not table.ARITHMETIC.isdisjoint((ruled.op, sites.base_of(ruled.op)))


def fills(ruled: OpUnderRule) -> bool:
    """Return True if a scalar beyond the low-precision dtype becomes that dtype's extreme."""
    return sites.base_of(ruled.op) in (*table.FILLS, "index_put")  # x[m] = s by another name


def is_sum(ruled: OpUnderRule) -> bool:
    """Return True if the op may add a mask to scores in a low-precision dtype."""
    return sites.base_of(ruled.op) in table.SUMS and ruled.dtype is not torch.float32


def takes_scores(ruled: OpUnderRule) -> bool:
    """Return True if the op's input may be scores with a mask added."""
    return not ruled.facts.users and not table.SCORE_TAKERS.isdisjoint(sites.ancestry(ruled.op))


def takes_masks(ruled: OpUnderRule) -> bool:
    """Return True if a tensor that the op is given may be a mask, or scores with one added: finite values stay finite in its casts."""
    return takes_scores(ruled) or sites.base_of(ruled.op) in table.MASK_TAKERS


def caster(ruled: OpUnderRule) -> Caster:
    """Return the function that casts the tensors of the rule's op: where these may be masks, finite values stay finite."""
    if takes_scores(ruled):
        return casting.cast_finite
    if is_sum(ruled):
        return casting.cast  # overflows() has looked at the values
    if takes_masks(ruled):
        return casting.cast_saturating
    return casting.cast_saturating_0dim if is_arithmetic(ruled) else casting.cast


# --- arithmetic ---------------------------------------------------------------------------------------------------------


def overflows(ruled: OpUnderRule, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return True if arithmetic has to saturate in `dtype`: with a finite scalar beyond it, or in a sum with a mask that may be."""
    if any(casting.overflows(value, dtype) for value in (*args, *kwargs.values())):
        return True
    operands = _operands(args, kwargs)
    return is_sum(ruled) and any(_may_be_mask(value, operands, dtype) and _is_large(value, dtype) for value in operands)


def _operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [value for name, value in (*enumerate(args), *kwargs.items()) if name not in ("alpha", "out")]


def _is_large(value: Any, dtype: torch.dtype) -> bool:
    """Return True if a number or a value of a tensor may take finite numbers beyond `dtype` when it is added."""
    least, most = casting.bounds(value) if isinstance(value, Tensor) else [casting.real(value)] * 2
    return not (-HARMLESS[dtype] < least and most < HARMLESS[dtype])


def _may_be_mask(value: Any, operands: list[Any], dtype: torch.dtype) -> bool:
    """Return True if an operand of a sum may be a mask.

    That is a number, or a tensor that needs no gradient and that the sum casts or broadcasts, or whose sum with scores needs one. Others
    are ordinary operands: to look at the values of those would take as long as to add them. `fast.sum_wrapper` has the usual answers.
    """
    if not isinstance(value, Tensor):
        return casting.real(value) is not None
    is_number = value.dtype in casting.CASTABLE or value.dtype in casting.INTEGERS
    if value.requires_grad or not is_number or not casting.is_dense(value):
        return False
    if value.dtype is not dtype:
        return True
    if not value.is_cpu and not _compiling():
        return False  # a device would be waited for, or each such sum be computed in float32
    if 0 in value.stride():
        return True
    others = [each for each in operands if each is not value and isinstance(each, Tensor)]
    return any(each.numel() > value.numel() or (each.requires_grad and _grad_enabled()) for each in others)


def saturated(op: Op, ruled: OpUnderRule, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the result of the op computed in float32, with finite values moved inside `dtype` and then cast to it.

    Of an op in place that is its first argument, with the result in it. Of a listed sum the inputs are rounded first, as where nothing
    saturates: compiled code saturates any sum that may hold a mask.
    """
    is_listed_sum = ruled.dtype is dtype and is_sum(ruled)
    cast_args, cast_kwargs = cast_call(args, kwargs, dtype, casting.cast) if is_listed_sum else (args, kwargs)
    cast_args, cast_kwargs = cast_call(tuple(cast_args), cast_kwargs, torch.float32, casting.cast)
    result = op(*cast_args, **cast_kwargs)
    if castable(result):
        try:
            is_dense_sum = is_sum(ruled) and casting.is_dense(result)
            wide = result
            result = casting.cast_sum(wide, _operands(args, kwargs), dtype) if is_dense_sum else casting.cast_finite(wide, dtype)
            if not _compiling() and here.call is not None:
                here.call.saturates = not casting.is_dense(wide) or _differ(_isinf(casting.cast(wide, dtype)), _isinf(result))
        except kernels.OF_CASTS as error:
            if not kernels.is_cast_refusal(error, (result,)):
                raise  # else the op has run: it is not called again
    return args[0].copy_(result) if ruled.facts.in_place else result


# --- fills and bounds -----------------------------------------------------------------------------------------------------


def baddbmm_of_mask(op: Op) -> Op:
    """Return baddbmm with sums that stay finite where its first input is a mask."""

    def baddbmm(*args: Any, **kwargs: Any) -> Any:
        mask: Any = args[0] if args else kwargs.get("input")
        dtype = getattr(mask, "dtype", None)
        if dtype not in (torch.bfloat16, torch.float16) or mask.requires_grad or not casting.is_dense(mask) or not _is_large(mask, dtype):
            return op(*args, **kwargs)
        adds = _and(_ne(mask, 0), _not(_isinf(mask)))  # before the result may be written there
        result: Tensor = op(*args, **kwargs)
        inside = _clamp(_detach(result), -FINITE_MAX[dtype], FINITE_MAX[dtype])
        finite = _where(_and(_isinf(_detach(result)), adds), inside, result)
        return result.copy_(finite) if result is mask or result is kwargs.get("out") else finite

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
        inside = bounded(args, kwargs, dtype, lambda t, low: casting.within(t, low) if t.dtype in casting.INTEGERS else t)
        return op(*inside[0], **inside[1])

    return choice


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have other values, or may have."""
    return casting.bounds(_ne(one, other)) != (0, 0)


SATURATING = {"baddbmm": baddbmm_of_mask, "where": choice_of_integers, "masked_fill": choice_of_integers}


def bounded(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype, of_tensor: Caster = lambda tensor, dtype: tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with each finite scalar beyond `dtype` moved to its finite extreme, and each tensor by `of_tensor`.

    That a value was moved is noted in a call that somebody listens to.
    """

    def inside(value: Any) -> Any:
        moved = of_tensor(value, dtype) if isinstance(value, Tensor) else casting.finite_scalar(value, dtype)
        if moved is not value and not _compiling() and here.call is not None:
            here.call.saturates |= not isinstance(value, Tensor) or _differ(value, moved)
        return moved

    return tuple(map(inside, args)), {name: inside(value) for name, value in kwargs.items()}


def written_value(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a castable tensor that needs no gradient with finite values moved inside `dtype`; any other itself."""
    return casting.within(value, dtype) if castable(value) and not value.requires_grad else value


def written_scalar(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `written_value` of a 0-dim tensor; any other itself."""
    return value if value.dim() else written_value(value, dtype)
