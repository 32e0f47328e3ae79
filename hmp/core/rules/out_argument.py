"""Calls with `out=` (R6): the op runs under its rule, and the result is written into `out` in the dtype of `out`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..casting import Tensor, cast_call, castable, deliver, each_castable, tensor_casts
from . import jit_trace, refusals, saturation
from .op_rule import survey
from .ruled_op import RuledOp

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def call_with_out(ruled: RuledOp, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the call, in `kwargs["out"]` (R6). Where torch raises, `call` without `out` finds whether a kernel is missing (R11)."""
    try:
        return _into_out(ruled, args, kwargs)
    except RuntimeError as error:
        failed_before = len(ruled.kernels.failed)
        if ruled.facts.retries and refusals.is_dtype_refusal(error):
            jit_trace.resume()
            try:
                call(args, _without_out(kwargs))
            except RuntimeError as second:
                if not refusals.is_torchs_own(second):
                    raise
                jit_trace.resume()
        if len(ruled.kernels.failed) == failed_before:
            raise
        return _into_out(ruled, args, kwargs)


def _into_out(ruled: RuledOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the op under its rule, in `kwargs["out"]` (R6)."""
    op, rule = ruled.op, ruled.rule
    out, rest = kwargs["out"], _without_out(kwargs)
    tensors = survey(args, rest, rule)
    if not tensors:
        return op(*args, **kwargs)
    first = args[0] if args else None
    if out is first and not (ruled.is_arithmetic and castable(first) and saturation.overflowing(args, rest, first.dtype)):
        # it writes into its first input: R5
        return op(*args, **kwargs) if ruled.mixes_in_place else ruled.in_place(*args, **kwargs)
    target = ruled.target(tensors, args, rest)
    if target is None:
        return op(*args, **kwargs)
    outs = list(each_castable((out,)))
    differentiating = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *outs))
    cast_args, cast_kwargs = cast_call(args, rest, target, ruled.caster, ruled.facts.keep)
    if ruled.is_arithmetic and target is not torch.float32 and saturation.overflowing(args, rest, target) and not differentiating:
        return deliver(saturation.saturated(op, args, rest, target), out)
    if not _must_be_copied(ruled, tensors, outs, target):
        return op(*cast_args, **cast_kwargs, out=out)  # torch writes into `out`, or raises
    if differentiating:
        return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
    result = deliver(op(*cast_args, **cast_kwargs), out)
    return None if rule.op.endswith("_copy") and isinstance(out, (list, tuple)) else result  # unbind_copy and the like


def _must_be_copied(ruled: RuledOp, tensors: list[Tensor], outs: list[Tensor], target: torch.dtype) -> bool:
    """Return True if the result is to be copied into `outs`, of which one has another dtype than the inputs are cast to.

    A listed op takes an `out` of any castable dtype: whether its inputs are low already depends on what ran before. An op on no list takes
    one of its inputs' dtypes, or the one that torch computes in without casts, and torch decides on all others.
    """
    others = {t.dtype for t in outs} - {target}
    if ruled.rule.kind.is_list:
        return bool(others)
    return bool(others) and others <= {tensor_casts.widest(tensors, count_0dim=True), *(t.dtype for t in tensors)}


def _without_out(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "out"}
