"""op_wrap() makes the wrapper of a torch function: it casts the inputs by one rule and calls the function.

What does not depend on the tensors of a call is decided here, once, when the wrapper is made.
"""

from __future__ import annotations

import functools

from ..cast_cache import cast_cache
from ..casting import Caster
from ..saved import keeping, noting
from ..torch_ops import op_facts
from . import kernel_fallback, lost_writes, rules, saturation
from .op_rule import Observer, Op, OpRule


def op_wrap(op: Op, rule: OpRule, observer: Observer | None = None) -> Op:
    """A function that calls `op` with its tensors cast by `rule`, and reports to the observer if there is one."""
    caster = _caster(rule)
    calls = (rule.kind.calls or rules.torchs)(op, rule)
    if rule.saved:
        calls, caster = tuple(_keeping(each, rule, hasattr(op, "inlined")) for each in calls), noting(caster)
    if observer is not None:
        calls, caster = tuple(observer.calling(each, rule) for each in calls), observer.casting(caster)
    wrapper = rule.kind.make(calls[0], rule, caster, *calls[1:])
    return wrapper if observer is None else observer.around(wrapper, rule)


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
