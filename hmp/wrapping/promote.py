"""R3 and R7: ops whose castable inputs get one dtype that the inputs tell, the widest one or the first one's."""

from __future__ import annotations

from typing import Any

import torch

from ..casting import Caster, Tensor
from .any_call import AnyCall
from .kernel_fallback import GIVEN_UP
from .op_rule import SCALARS, Op, OpRule

_Parameter = torch.nn.Parameter


def promote_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """R3, R7: the op with its castable inputs in the dtype that they tell."""
    ruled = AnyCall(op, rule, caster)
    return ruled.wrapper() if rule.asks_for_kernels or rule.saturates else _same(ruled)


def _same(ruled: AnyCall) -> Op:
    """R3, R7: the call with nothing to cast, plain tensors of one dtype, in few steps; any other one as any call.

    A switch sees that too, and calls torch then. But only a builtin's does, and for the casts in focus alone: Python functions, observers,
    compiled code and the regions beside come here without it.
    """
    # what each call reads, as variables of its own
    op, call, again, failed = ruled.op, ruled.call, ruled.again, ruled.kernels.failed

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
            result = again(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    same.again, same.failed = again, failed  # type: ignore[attr-defined]  # for calls that skip the wrapper
    return same
