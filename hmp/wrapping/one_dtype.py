"""Wrappers of ops whose castable inputs all get one dtype: the list's (R1, R2), the widest among them (R3) or the first one's (R7)."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..casting import FINITE_MAX, Caster, Tensor, tensor_casts
from .any_call import AnyCall, refusing_writes
from .copied_views import shares_memory
from .kernel_fallback import GIVEN_UP
from .op_rule import SCALARS, Op, OpRule, writes

_Parameter = torch.nn.Parameter
_dtype = torch.dtype
_MKLDNN = tensor_casts.MKLDNN
_NUMBERS = frozenset({int, float, bool})
_HEEDED = tensor_casts.LEFT_TO_TORCH | tensor_casts.CASTABLE


def one_dtype_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `op` with its castable inputs in `rule.dtype` (R1, R2), or in the one that they have among them (R3, R7)."""
    ruled = AnyCall(op, rule, caster)
    needs_care = rule.saturates if rule.dtype is None else rule.users
    return ruled.wrapper() if rule.asks_for_kernels or needs_care else _plain_calls(ruled)


def _plain_calls(ruled: AnyCall) -> Op:
    """A function that has little to do for a call with positional arguments and plain tensors, and sends any other call to `ruled.call`.

    Where the dtype is the list's it casts such tensors; where it is that of the tensors it sees whether they have one. A dispatcher does
    the same by itself, but only in the place of a builtin, and only for the one policy that its code is written for. Python functions
    (`F.softmax`), observers, compiled code and regions of other policies call this function instead.
    """
    # local variables: a call reads them faster than attributes
    op, rule, caster, call, retry, failed = ruled.op, ruled.rule, ruled.caster, ruled.call, ruled.retry, ruled.kernels.failed
    # None: the dtype of the first tensor, where all have it. Rules by which scalars saturate never come here then
    listed: Any = rule.dtype
    is_listed, limit = listed is not None, math.inf if listed is None else FINITE_MAX[listed]
    may_write = rule.inplace_at is not None or rule.out_at is not None
    # ruled.call finds what dtype tensors have among them, and casts for an op with inputs that are never cast
    is_view, cast_here = rule.view, tensor_casts.CASTABLE if is_listed and not rule.keep else frozenset()

    def one_dtype(*args: Any, **kwargs: Any) -> Any:
        if kwargs or failed or (may_write and writes(args, kwargs, rule)):
            return call(args, kwargs)
        cast_args: Any = args
        target = listed
        i = -1  # enumerate() would take longer
        for a in args:
            i += 1
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                dtype = a.dtype
                if dtype is target or (is_listed and dtype not in _HEEDED):
                    continue
                if target is None:
                    target = dtype
                    continue
                # softmax(dim, float32): nothing is to be cast before that is known
                if dtype in cast_here and a.layout is not _MKLDNN and type(args[-1]) is not _dtype:
                    if cast_args is args:
                        cast_args = list(args)
                    cast_args[i] = caster(a, target)
                    continue
            elif (
                -limit <= a <= limit
                if kind is float or kind is int
                else _NUMBERS.issuperset(map(type, a))
                if kind is tuple or kind is list
                else kind in SCALARS
            ):
                continue
            return call(args, kwargs)
        try:
            result = op(*cast_args)
            return _refusing(result, ruled, cast_args, args) if is_view and cast_args is not args else result
        except RuntimeError as error:
            result = retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    one_dtype.again, one_dtype.failed = retry, failed  # type: ignore[attr-defined]  # for dispatchers, whose calls skip this function
    return one_dtype


def _refusing(result: Any, ruled: AnyCall, cast_args: list[Any], args: tuple[Any, ...]) -> Any:
    """`result`, such that writes into it raise where it is a view of one of `cast_args`, or one of them (R10)."""
    # most calls of dropout end here
    return refusing_writes(result, ruled, (cast_args, {}), (args, {})) if shares_memory(result, cast_args) else result
