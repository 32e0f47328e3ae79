"""Wrappers of promoted and unlisted ops: all castable inputs get the widest dtype among them (R3), or the first one's (R7)."""

from __future__ import annotations

from typing import Any

import torch

from ..casting import Caster, Tensor
from .any_call import AnyCall
from .kernel_fallback import GIVEN_UP
from .op_rule import SCALARS, Op, OpRule

_Parameter = torch.nn.Parameter


def promote_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `op` with its castable inputs in their widest dtype (R3), or in the first one's (R7)."""
    ruled = AnyCall(op, rule, caster)
    return ruled.wrapper() if rule.asks_for_kernels or rule.saturates else _same(ruled)


def _same(ruled: AnyCall) -> Op:
    """A function that has little to do for a call with plain tensors of one dtype, and sends any other call to `ruled.call`.

    A dispatcher checks this by itself, but only in the place of a builtin, and only for the one policy that its code is written for.
    Python functions, observers, compiled code and regions of other policies call this function instead.
    """
    # local variables: a call reads them faster than attributes
    op, call, retry, failed = ruled.op, ruled.call, ruled.retry, ruled.kernels.failed

    def same(*args: Any, **kwargs: Any) -> Any:
        if kwargs or failed:
            return call(args, kwargs)
        first = None
        for a in args:
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                if first is None:
                    first = a.dtype
                elif a.dtype is not first:
                    return call(args, kwargs)
            elif kind not in SCALARS and kind is not int and kind is not float:
                return call(args, kwargs)
        try:
            return op(*args)
        except RuntimeError as error:
            result = retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    same.again, same.failed = retry, failed  # type: ignore[attr-defined]  # for dispatchers, whose calls skip this function
    return same
