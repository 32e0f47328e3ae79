"""op_wrap(): one torch function becomes the function that casts its inputs by one rule, and calls it.

Every decision that does not depend on the call's tensors is taken here, when the wrapper is built.
"""

from __future__ import annotations

from collections.abc import Callable

from ..caches import cast_cache
from ..casting import Caster, tensor_casts
from ..context import without_casts
from ..ops import op_facts
from . import autocast_inside, norms_and_lookups, refusals, saturation
from .fixed_dtype import fixed_dtype_wrapper
from .in_place import in_place_wrapper, no_kernel_in_place_wrapper
from .op_rule import Kind, Observer, Op, OpRule, chooser
from .promote import promote_wrapper
from .unlisted import inside_wrapper, unlisted_wrapper

# What each kind of rule makes of an op. The kind "autocast" is two rules: see op_wrap.
_WRAPPERS: dict[Kind, Callable[[Op, OpRule, Caster], Op]] = {
    "bf16": fixed_dtype_wrapper,
    "fp32": fixed_dtype_wrapper,
    "promote": promote_wrapper,
    "first": promote_wrapper,
    "no_kernel": unlisted_wrapper,
    "inside": inside_wrapper,
    "in_place": in_place_wrapper,
    "no_kernel_in_place": lambda op, rule, caster: no_kernel_in_place_wrapper(op, rule),
    "mask_in_place": lambda op, rule, caster: saturation.mask_in_place_wrapper(op),
    "fill": lambda op, rule, caster: saturation.fill_wrapper(op, rule),
    "guard": lambda op, rule, caster: saturation.guard_wrapper(op, rule),
    "guard_in_place": lambda op, rule, caster: saturation.guard_wrapper(op, rule),
}
# Kinds that a list asks for, or mixed inputs: a norm's or a look-up's inputs are not all cast then.
_CASTS_INPUTS = frozenset({"bf16", "fp32", "promote", "first"})


def op_wrap(op: Op, rule: OpRule, observer: Observer | None = None) -> Op:
    """The function that calls `op` with its tensors cast by `rule`; with an observer, one that tells it as well."""
    caster = _caster(rule)
    inner = without_casts(op) if rule.composite else op
    if rule.asks_torch_first and not refusals.is_torchs_function(op):
        rule = rule._replace(asks_torch_first=False)  # what somebody put in torch's place is the user's Python, and called once
    if observer is not None:
        caster = observer.casting(caster)
        inner = observer.calling(inner, rule)
    if rule.kind == "autocast":
        unlisted = inner if rule.unlisted is None else op_wrap(op, rule.unlisted)
        wrapper = autocast_inside.wrapper(inner, unlisted, rule)
    elif rule.op in norms_and_lookups.BUILDERS and rule.kind in _CASTS_INPUTS:
        wrapper = norms_and_lookups.BUILDERS[rule.op](inner, rule.op, rule.order, chooser(rule), caster)
    else:
        wrapper = _WRAPPERS[rule.kind](inner, rule, caster)
    return wrapper if observer is None else observer.around(wrapper, rule)


def _caster(rule: OpRule) -> Caster:
    """How the rule's op has a tensor cast: by a copy that is kept (R18), or with values that stay finite (R12)."""
    if rule.op in op_facts.PRODUCTS:
        return cast_cache.cast_product_input
    if rule.op in op_facts.RECURRENT:
        return cast_cache.cast_weights
    if rule.score_taker:
        return tensor_casts.cast_finite
    if rule.mask_taker:
        return tensor_casts.cast_saturating
    return tensor_casts.cast_saturating_0dim if rule.arithmetic else tensor_casts.cast
