"""op_wrap() makes the wrapper of a torch function: it casts the inputs by one rule and calls the function.

What does not depend on the tensors of a call is decided here, once, when the wrapper is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..caches import cast_cache
from ..casting import Caster, tensor_casts
from ..context import without_casts
from ..ops import op_facts
from ..saved import keeping, noting
from . import autocast_inside, float32_products, kernel_fallback, lost_writes, norms_and_lookups, refusals, saturation
from .in_fp8 import fp8_product, fp8_product_wrapper
from .in_place import in_place_wrapper, no_kernel_in_place_wrapper
from .one_buffer import with_one_buffer
from .one_dtype import one_dtype_wrapper
from .op_rule import Kind, Observer, Op, OpRule
from .unlisted import inside_wrapper, unlisted_wrapper

# What makes the wrapper, by the kind of the rule. The kinds "fp8" and "autocast" need more: see op_wrap.
_WRAPPERS: dict[Kind, Callable[[Op, OpRule, Caster], Op]] = {
    "bf16": one_dtype_wrapper,
    "fp32": one_dtype_wrapper,
    "promote": one_dtype_wrapper,
    "first": one_dtype_wrapper,
    "no_kernel": unlisted_wrapper,
    "inside": inside_wrapper,
    "in_place": in_place_wrapper,
    "no_kernel_in_place": lambda op, rule, caster: no_kernel_in_place_wrapper(op, rule),
    "mask_in_place": lambda op, rule, caster: saturation.mask_in_place_wrapper(op),
    "fill": lambda op, rule, caster: saturation.fill_wrapper(op, rule),
    "guard": lambda op, rule, caster: saturation.guard_wrapper(op, rule),
    "guard_in_place": lambda op, rule, caster: saturation.guard_wrapper(op, rule),
    "saved": lambda op, rule, caster: op,
}
# Kinds under which inputs are cast; those of norms and look-ups have a wrapper of their own, for not all of them may be.
_CASTS_INPUTS = frozenset({"bf16", "fp32", "promote", "first"})


def op_wrap(op: Op, rule: OpRule, observer: Observer | None = None) -> Op:
    """A function that calls `op` with its tensors cast by `rule`, and reports to the observer if there is one."""
    caster = _caster(rule)
    in_graph = hasattr(op, "inlined")
    own = without_casts(op) if rule.composite else with_one_buffer(op, rule.op)
    wide = float32_products.in_float32(own, rule) if float32_products.applies(rule) else own
    if rule.saved:
        own, wide, caster = _keeping(own, rule, in_graph), _keeping(wide, rule, in_graph), noting(caster)
    if rule.asks_torch_first and not refusals.is_torchs_function(op):
        rule = rule._replace(asks_torch_first=False)  # somebody else's patch of torch is the user's Python, which must not run twice
    if observer is not None:
        caster = observer.casting(caster)
        own, wide = observer.calling(own, rule), observer.calling(wide, rule)
    inner = own if rule.kind == "autocast" else wide
    if rule.kind == "fp8":
        product = fp8_product(rule, getattr(op, "inlined", None))
        product = _keeping(product, rule, in_graph) if rule.saved else product
        wrapper = fp8_product_wrapper(inner, product if observer is None else observer.calling(product, rule), rule, caster)
    elif rule.kind == "autocast":
        unlisted = inner if rule.unlisted is None else op_wrap(op, rule.unlisted)
        wrapper = autocast_inside.wrapper(inner, unlisted, rule, caster)
        if float32_products.applies(rule):
            wrapper = float32_products.under_autocast(wrapper, wide, rule, caster)
    elif rule.op in norms_and_lookups.BUILDERS and rule.kind in _CASTS_INPUTS:
        wrapper = norms_and_lookups.BUILDERS[rule.op](inner, rule, caster)
    else:
        wrapper = _WRAPPERS[rule.kind](inner, rule, caster)
    return wrapper if observer is None else observer.around(wrapper, rule)


def _keeping(op: Op, rule: OpRule, in_graph: bool) -> Op:
    kept = keeping(op, rule.op, rule.saved, kernel_fallback.count_not_packed, in_graph)
    functools.update_wrapper(kept, op, ("computes", "computes_in_float32"), ())
    return kept


def _caster(rule: OpRule) -> Caster:
    """The function that casts the tensors of the rule's op: cached (R18), saturating (R12) or plain."""
    if rule.users:
        return lost_writes.watched_cast
    if rule.op in op_facts.PRODUCTS:
        return cast_cache.cast_product_input
    if rule.op in op_facts.CELLS:
        return cast_cache.cast_weights
    if rule.op in op_facts.RECURRENT:
        return cast_cache.cast_recurrent
    if rule.score_taker:
        return tensor_casts.cast_finite
    if rule.mask_taker:
        return tensor_casts.cast_saturating
    return tensor_casts.cast_saturating_0dim if rule.arithmetic else tensor_casts.cast
