"""Wrappers of ops on the BF16 and the FP32 list (R1, R2): one dtype for all castable inputs, known before the call."""

from __future__ import annotations

from typing import Any

import torch

from ..casting import FINITE_MAX, Caster, Tensor, tensor_casts
from .any_call import AnyCall, refusing_writes
from .copied_views import shares_memory
from .kernel_fallback import GIVEN_UP
from .op_rule import SCALARS, Op, OpRule

_Parameter = torch.nn.Parameter
_dtype = torch.dtype
_MKLDNN = tensor_casts.MKLDNN
_NUMBERS = frozenset({int, float, bool})


def fixed_dtype_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `op` with its castable inputs in `rule.dtype` (R1, R2)."""
    ruled = AnyCall(op, rule, caster)
    return ruled.wrapper() if rule.asks_for_kernels or rule.users else _uniform(ruled)


def _uniform(ruled: AnyCall) -> Op:
    """A function that has little to do for a call with positional arguments and plain tensors, and sends any other call to `ruled.call`.

    A dispatcher casts such calls by itself, but only in the place of a builtin, and only for the one policy that its code is written for.
    Python functions (`F.softmax`), observers, compiled code and regions of other policies call this function instead.
    """
    # local variables: a call reads them faster than attributes
    op, rule, caster, call, retry, failed = ruled.op, ruled.rule, ruled.caster, ruled.call, ruled.retry, ruled.kernels.failed
    fixed: Any = rule.dtype
    limit = FINITE_MAX[fixed]
    flag_at, out_at = rule.inplace_at, rule.out_at
    # ruled.call casts for an op with inputs that are never cast
    needs_care, is_view = bool(rule.keep), rule.view
    cast_here = frozenset() if needs_care else tensor_casts.CASTABLE
    needs_call = tensor_casts.LEFT_TO_TORCH | tensor_casts.CASTABLE if needs_care else tensor_casts.LEFT_TO_TORCH

    def uniform(*args: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or failed
            or (args and type(args[-1]) is _dtype)  # softmax(dim, float32): nothing is to be cast before that is known
            or (flag_at is not None and flag_at < len(args) and args[flag_at])
            or (out_at is not None and out_at < len(args) and args[out_at] is not None)
        ):
            return call(args, kwargs)
        cast_args: Any = args
        for i, a in enumerate(args):
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                dtype = a.dtype
                if dtype is fixed:
                    continue
                if dtype in cast_here and a.layout is not _MKLDNN:
                    if cast_args is args:
                        cast_args = list(args)
                    cast_args[i] = caster(a, fixed)
                elif dtype in needs_call:
                    return call(args, kwargs)
            elif not (
                -limit <= a <= limit
                if kind is float or kind is int
                else _NUMBERS.issuperset(map(type, a))
                if kind is tuple or kind is list
                else kind in SCALARS
            ):
                return call(args, kwargs)
        try:
            result = op(*cast_args)
            return _refusing(result, ruled, cast_args, args) if is_view and cast_args is not args else result
        except RuntimeError as error:
            result = retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    uniform.again, uniform.failed = retry, failed  # type: ignore[attr-defined]  # for dispatchers, whose calls skip this function
    return uniform


def _refusing(result: Any, ruled: AnyCall, cast_args: list[Any], args: tuple[Any, ...]) -> Any:
    """`result`, such that writes into it raise where it is a view of one of `cast_args`, or one of them (R10)."""
    # most calls of dropout end here
    return refusing_writes(result, ruled, (cast_args, {}), (args, {})) if shares_memory(result, cast_args) else result
