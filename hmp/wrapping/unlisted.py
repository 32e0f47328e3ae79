"""R11 for ops that no list is about: torch computes them as it finds them, and what it has no kernel for runs in float32."""

from __future__ import annotations

from typing import Any

from ..casting import Caster
from .any_call import AnyCall
from .kernel_fallback import GIVEN_UP
from .op_rule import Op, OpRule, writes


def unlisted_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """R11: the op as it is called; what failed is tried in float32, and from then on every call is looked at."""
    ruled = AnyCall(op, rule, caster)
    if rule.asks_for_kernels:
        return ruled.wrapper()
    call, again, failed = ruled.call, ruled.again, ruled.kernels.failed

    def unlisted(*args: Any, **kwargs: Any) -> Any:
        if failed:
            return call(args, kwargs)
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            result = GIVEN_UP if writes(args, kwargs, rule) else again(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    return unlisted


def inside_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """R11: an op that torch writes in Python, tried again as a whole; torch's own function where that must not be."""
    return unlisted_wrapper(op, rule, caster) if rule.retries else op
