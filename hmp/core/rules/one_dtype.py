"""Wrappers of ops whose castable inputs all get one dtype: the list's (R1, R2), the widest among them (R3) or the first one's (R7)."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..cast_cache import cast_cache, shared_cast, weight_cache, write_marks
from ..casting import FINITE_MAX, Caster, Tensor, tensor_casts
from ..torch_private import trace_here as _tracing
from . import saturation
from .any_call import AnyCall, refusing_writes
from .copied_views import shares_memory
from .kernel_fallback import GIVEN_UP
from .op_rule import SCALARS, Op, OpRule, writes

_Parameter = torch.nn.Parameter
_dtype = torch.dtype
_MKLDNN = tensor_casts.MKLDNN
_NUMBERS = frozenset({int, float, bool})
_SEQUENCES = frozenset({tuple, list})
_CASTABLE = tensor_casts.CASTABLE
_HEEDED = tensor_casts.LEFT_TO_TORCH | _CASTABLE
# torch's own, taken before anything is patched
_strided, _grad_enabled = torch.strided, torch.is_grad_enabled
_used_once = weight_cache.used_once


def one_dtype_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `op` with its castable inputs in `rule.dtype` (R1, R2), or in the one that they have among them (R3, R7)."""
    ruled = AnyCall(op, rule, caster)
    facts = rule.facts
    needs_care = ruled.is_arithmetic or saturation.fills(rule) if rule.dtype is None else facts.users
    if ruled.kernels.may_lack or needs_care:
        return ruled.wrapper()
    is_product = caster is cast_cache.cast_product_input and rule.dtype is not None
    takes_all = not facts.view and not facts.keep and facts.inplace_at is None and facts.out_at is None
    return _plain_products(ruled) if is_product and takes_all else _plain_calls(ruled)


def _plain_products(ruled: AnyCall) -> Op:
    """As `_plain_calls`, for a matrix product or a convolution on a list: the cache is asked only for what it would keep.

    To ask it takes as long as a small cast. In a trace it is asked for all: torch.jit compares the lines of a trace that was made with
    gradients with those of one made without."""
    op, target, call, retry, failed = ruled.op, ruled.rule.dtype, ruled.call, ruled.retry, ruled.kernels.failed
    assert target is not None
    to, limit = tensor_casts.TO[target], FINITE_MAX[target]

    def product(*args: Any, **kwargs: Any) -> Any:
        if kwargs or failed or _tracing() is not None:
            return call(args, kwargs)
        grad, least = _grad_enabled(), shared_cast.least
        cast_args = []
        for a in args:
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                dtype = a.dtype
                if dtype is not target and dtype in _HEEDED:
                    if dtype not in _CASTABLE or a.layout is not _strided:
                        return call(args, kwargs)
                    needs_grad = grad and a.requires_grad
                    is_small = a.nbytes < (least if needs_grad else shared_cast.WORTH_KEEPING)
                    if is_small and (kind is Tensor or (needs_grad and id(a) in _used_once)):
                        a = to(a)
                    else:
                        a = (cast_cache.low_activation if kind is Tensor else cast_cache.low_weight)(a, target)
            elif not (
                -limit <= a <= limit
                if kind is int or kind is float
                else kind in SCALARS or (kind in _SEQUENCES and _NUMBERS.issuperset(map(type, a)))
            ):
                return call(args, kwargs)
            cast_args.append(a)
        try:
            return op(*cast_args)
        except RuntimeError as error:
            if (result := retry(error, args, kwargs)) is GIVEN_UP:
                raise
            return result

    write_marks.reads_only(product.__code__)
    return product


def _plain_calls(ruled: AnyCall) -> Op:
    """A function that has little to do for a call with positional arguments and plain tensors, and sends any other call to `ruled.call`.

    Where the dtype is the list's it casts such tensors; where it is that of the tensors it sees whether they have one.
    """
    # local variables: a call reads them faster than attributes
    op, rule, caster, call, retry, failed = ruled.op, ruled.rule, ruled.caster, ruled.call, ruled.retry, ruled.kernels.failed
    # None: the dtype of the first tensor, where all have it. Rules by which scalars saturate never come here then
    listed: Any = rule.dtype
    is_listed, limit = listed is not None, math.inf if listed is None else FINITE_MAX[listed]
    may_write = rule.facts.inplace_at is not None or rule.facts.out_at is not None
    # ruled.call finds what dtype tensors have among them, and casts for an op with inputs that are never cast
    is_view, cast_here = rule.facts.view, tensor_casts.CASTABLE if is_listed and not rule.facts.keep else frozenset()

    def one_dtype(*args: Any, **kwargs: Any) -> Any:
        if kwargs or failed or (may_write and writes(args, kwargs, rule)):
            return call(args, kwargs)
        cast_args: Any = args
        target = listed
        i = -1  # enumerate() would take longer
        for a in args:
            i += 1
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                dtype = a.dtype
                if dtype is target or (is_listed and dtype not in _HEEDED):
                    continue
                if target is None:
                    target = dtype
                    continue
                # softmax(dim, float32): nothing is to be cast before that is known
                if dtype in cast_here and a.layout is not _MKLDNN and type(args[-1]) is not _dtype:
                    if cast_args is args:
                        cast_args = list(args)
                    cast_args[i] = caster(a, target)
                    continue
            elif (
                -limit <= a <= limit
                if kind is float or kind is int
                else _NUMBERS.issuperset(map(type, a))
                if kind is tuple or kind is list
                else kind in SCALARS
            ):
                continue
            return call(args, kwargs)
        try:
            result = op(*cast_args)
            return _refusing(result, ruled, cast_args, args) if is_view and cast_args is not args else result
        except RuntimeError as error:
            result = retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    return one_dtype


def _refusing(result: Any, ruled: AnyCall, cast_args: list[Any], args: tuple[Any, ...]) -> Any:
    """`result`, such that writes into it raise where it is a view of one of `cast_args`, or one of them (R10)."""
    # most calls of dropout end here
    return refusing_writes(result, ruled, (cast_args, {}), (args, {})) if shares_memory(result, cast_args) else result
