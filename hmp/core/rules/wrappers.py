"""op_wrap() makes the wrapper of a torch function: it casts the inputs by one rule and calls the function.

What does not depend on the tensors of a call is decided here, once, when the wrapper is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ..cast_cache import cast_cache
from ..casting import Caster
from ..observe import Listener, clock_of
from ..saved import keeping, noting
from ..torch_ops import op_facts
from . import kernel_fallback, lost_writes, rules, saturation
from .observed import counted, observed, timed
from .op_rule import Op, OpRule


def op_wrap(op: Op, rule: OpRule, told: Sequence[Listener] = (), around_cast: Callable[[Caster], Caster] | None = None) -> Op:
    """Return a function that calls `op` with its tensors cast by `rule`.

    Args:
        op: Torch's own function.
        rule: The op under its rule.
        told: Those that are told of each call.
        around_cast: Gives a function that is called in the place of the one that casts.
    """
    caster = _caster(rule) if around_cast is None else around_cast(_caster(rule))
    calls = (rule.kind.calls or rules.torchs)(op, rule)
    if rule.saved:
        calls, caster = tuple(_keeping(each, rule, hasattr(op, "inlined")) for each in calls), noting(caster)
    clock = clock_of(told) if told else None
    if clock is not None:
        calls, caster = tuple(timed(each, rule, told, clock) for each in calls), counted(caster, clock, told)
    wrapper = rule.kind.make(calls[0], rule, caster, *calls[1:])
    return observed(wrapper, rule, op, told, clock) if told else wrapper


def _keeping(op: Op, rule: OpRule, in_graph: bool) -> Op:
    kept = keeping(op, rule.op, rule.saved, kernel_fallback.count_not_packed, in_graph)
    functools.update_wrapper(kept, op, ("computes", "computes_in_float32"), ())
    return kept


def _caster(rule: OpRule) -> Caster:
    """The function that casts the tensors of the rule's op: cached (R18), saturating (R12) or plain."""
    if rule.facts.users:
        return lost_writes.watched_cast
    if rule.op in op_facts.PRODUCTS:
        return cast_cache.cast_product_input
    if rule.op in op_facts.CELLS:
        return cast_cache.cast_weights
    if rule.op in op_facts.RECURRENT:
        return cast_cache.cast_recurrent
    return saturation.caster(rule)
