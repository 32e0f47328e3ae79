"""Wrappers of ops on no list that cast nothing, unless torch has no kernel: those calls run in float32 (R11)."""

from __future__ import annotations

from typing import Any

from ..casting import Caster
from .any_call import AnyCall
from .kernel_fallback import GIVEN_UP
from .op_rule import Op, OpRule, writes


def unlisted_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `op` unchanged, and again in float32 where it raises for want of a kernel (R11). After the first such failure
    each call is checked before `op` is tried."""
    ruled = AnyCall(op, rule, caster, leaves_dtypes=True)
    if ruled.kernels.may_lack:
        return ruled.wrapper()
    call, retry, failed = ruled.call, ruled.retry, ruled.kernels.failed

    def unlisted(*args: Any, **kwargs: Any) -> Any:
        if failed:
            return call(args, kwargs)
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            result = GIVEN_UP if writes(args, kwargs, rule) else retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    return unlisted


def inside_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """The wrapper of an op that torch writes in Python, which runs again as a whole (R11); `op` itself where it must not run twice."""
    return unlisted_wrapper(op, rule, caster) if rule.facts.retries else op
