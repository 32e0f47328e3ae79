"""R1 and R2: ops of the BF16 and the FP32 list, whose castable inputs all get one dtype that is known beforehand."""

from __future__ import annotations

from typing import Any

import torch

from ..casting import FINITE_MAX, Caster, Tensor, tensor_casts
from .any_call import AnyCall
from .kernel_fallback import GIVEN_UP
from .op_rule import SCALARS, Op, OpRule

_Parameter = torch.nn.Parameter
_MKLDNN = tensor_casts.MKLDNN
_NUMBERS = frozenset({int, float, bool})


def fixed_dtype_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """R1, R2: the op with its castable inputs in `rule.dtype`."""
    ruled = AnyCall(op, rule, caster)
    return ruled.wrapper() if rule.asks_for_kernels else _uniform(ruled)


def _uniform(ruled: AnyCall) -> Op:
    """R1, R2: the common call, positional arguments and plain tensors, in few steps; any other one as any call.

    A switch looks at these arguments too, and casts what is ordinary. But only a builtin's does, and for the casts in focus alone: Python
    functions (`F.softmax`), observers, compiled code and the regions beside come here without it.
    """
    # what each call reads, as variables of its own
    op, rule, caster, call, again, failed = ruled.op, ruled.rule, ruled.caster, ruled.call, ruled.again, ruled.kernels.failed
    fixed: Any = rule.dtype
    limit = FINITE_MAX[fixed]
    flag_at, out_at = rule.inplace_at, rule.out_at
    # an input that is to be kept as it is, and a view, whose copy refuses writes (R10), are no common call's
    needs_care = bool(rule.keep) or rule.view
    cast_here = frozenset() if needs_care else tensor_casts.CASTABLE
    cast_there = tensor_casts.LEFT_TO_TORCH | tensor_casts.CASTABLE if needs_care else tensor_casts.LEFT_TO_TORCH

    def uniform(*args: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or failed
            or (flag_at is not None and flag_at < len(args) and args[flag_at])
            or (out_at is not None and out_at < len(args) and args[out_at] is not None)
        ):
            return call(args, kwargs)
        given: Any = args
        for i, a in enumerate(args):
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                dtype = a.dtype
                if dtype is fixed:
                    continue
                if dtype in cast_here and a.layout is not _MKLDNN:
                    if given is args:
                        given = list(args)
                    given[i] = caster(a, fixed)
                elif dtype in cast_there:
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
            return op(*given)
        except RuntimeError as error:
            result = again(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    uniform.again, uniform.failed = again, failed  # type: ignore[attr-defined]  # for calls that skip the wrapper
    return uniform
