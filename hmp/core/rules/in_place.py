"""Wrappers of ops that write into their first input (R5): the other inputs are cast to its dtype, and it is never cast."""

from __future__ import annotations

from typing import Any

import torch

from ..casting import Caster, Tensor, cast_call, castable, each_castable
from ..torch_ops import op_facts, sites
from . import lost_writes, refusals, saturation
from .kernel_fallback import Kernels
from .op_rule import Op, OpRule, survey


def in_place_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `op` with the other castable inputs in the dtype of the first (R5), or in float32 without a kernel (R11)."""
    kernels, facts, fills = Kernels(rule), rule.facts, saturation.fills(rule)
    is_refused_in_backward = facts.in_place and sites.base_of(rule.op) in op_facts.MIXED_BACKWARD_RAISES

    def in_place(*args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if facts.users:  # a user's function: the `self` of a method is no tensor
            first = next(each_castable((*args, *kwargs.values())), None)
        tensors = survey(args, kwargs, rule)
        if not castable(first) or tensors is None:
            return op(*args, **kwargs)
        if is_refused_in_backward and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return op(*args, **kwargs)
        try:
            if kernels.lacks_in_place(first):
                # R11: computed in float32, then written into the input itself
                cast_args, cast_kwargs = cast_for(first, torch.float32, args, kwargs)
                return first.copy_(op(*cast_args, **cast_kwargs))
            cast_args, cast_kwargs = cast_for(first, first.dtype, args, kwargs)
            if facts.users:
                return lost_writes.call(op, rule.op, (cast_args, cast_kwargs), (args, kwargs), facts.order)
            return op(*cast_args, **cast_kwargs)
        except refusals.OF_CASTS as error:
            if not refusals.is_cast_refusal(error, (args, kwargs)):
                raise
        return op(*args, **kwargs)

    def cast_for(first: Tensor, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with castable tensors in `dtype`; the values of a fill stay finite in the dtype of `first` (R12)."""
        if fills:
            # an index is no value: x[70000] = s
            index = args[1:2] if rule.op == "setitem" else ()
            values, kwargs = saturation.bounded(args[1 + len(index) :], kwargs, first.dtype)
            values = tuple(saturation.scalar(saturation.written_value(a, first.dtype), first.dtype) for a in values)
            args = (first, *index, *values) if args else args
        return cast_call(args, kwargs, dtype, caster, facts.keep)

    return in_place


def no_kernel_in_place_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `op` itself, and computes in float32 where `op` is known to have no kernel for its first input (R5, R11)."""
    in_float32 = in_place_wrapper(op, rule, caster)
    kernels = Kernels(rule)

    def in_place(*args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        # not counted here: in_float32 counts the call
        return (in_float32 if castable(first) and kernels.lacks_in_place(first, counted=False) else op)(*args, **kwargs)

    return in_place
