"""Wrappers for usual calls, of plain tensors by position or by keyword; each leaves all other calls to a general wrapper.

They are long, for a call in Python takes as long as five of their lines.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import casting, copies
from ..active import state
from ..casting import FINITE_MAX, Caster, Tensor, each_castable
from ..torch_private import functorch_level as _level
from ..torch_private import trace_here as _tracing
from . import overflow
from .general import GeneralWrapper
from .kernels import GIVEN_UP
from .op import SCALARS, Op, OpUnderRule, writes

_Parameter = torch.nn.Parameter
_dtype, _float32 = torch.dtype, torch.float32
_MKLDNN = casting.MKLDNN
_NUMBERS = frozenset({int, float, bool})
_SEQUENCES = frozenset({tuple, list})
_PLAIN = frozenset({Tensor, _Parameter})
_BASIC = frozenset({int, slice, type(None), type(Ellipsis)})  # what an index of a view is made of
_CASTABLE = casting.CASTABLE
_HEEDED = casting.LEFT_TO_TORCH | _CASTABLE
# torch's own, taken before anything is patched
_strided, _grad_enabled = torch.strided, torch.is_grad_enabled
_used_once, _note_use, _LEAST = copies.used_once, copies.used_once.__setitem__, copies.LEAST


# --- one dtype for all inputs -----------------------------------------------------------------------------------------------


def one_dtype_wrapper(op: Op, ruled: OpUnderRule, caster: Caster) -> Op:
    """Return the wrapper of an op whose castable inputs get the list's dtype, that of the first in place, or the one that they share."""
    general = GeneralWrapper(op, ruled, caster)
    if ruled.op == "setitem":
        return _setitem_wrapper(op, general.wrapper())
    if overflow.is_sum(ruled):
        return sum_wrapper(op, ruled, general.wrapper())
    needs_care = general.is_arithmetic or general.fills if ruled.dtype is None else ruled.facts.users
    return general.wrapper() if general.kernels.may_lack or needs_care else _fast_wrapper(general)


def _fast_wrapper(general: GeneralWrapper) -> Op:
    """Return the wrapper that casts where the list says the dtype, else checks that all tensors have the same dtype.

    Of a product a small activation, and a weight that is used once, is cast at once, without asking for a copy: to ask takes as long as a
    small cast. In a trace `caster` makes all casts: torch.jit compares the lines of a trace made with gradients with those of one without.
    """
    # local variables: a call reads them faster than attributes
    op, ruled, caster, retry, any_call, failed = (
        general.op, general.ruled, general.caster, general.retry, general.wrapper(), general.kernels.failed
    )  # fmt: skip
    # None: the dtype of the first tensor, where all have it. Rules by which scalars saturate never come here then
    listed: Any = ruled.dtype
    is_listed, limit = listed is not None, math.inf if listed is None else FINITE_MAX[listed]
    has_copies = is_listed and caster is copies.shared_cast
    to: Any = casting.widened if listed is _float32 else casting.TO.get(listed)
    may_write = ruled.facts.inplace_at is not None or ruled.facts.out_at is not None
    # the general wrapper finds what dtype tensors have among them, and casts for an op with inputs that are never cast
    cast_here = _CASTABLE if is_listed and not ruled.facts.keep else frozenset()

    def fast(*args: Any, **kwargs: Any) -> Any:
        given: Any = (*args, *kwargs.values()) if kwargs else args
        if (
            failed
            or (may_write and writes(args, kwargs, ruled))
            or (
                kwargs
                and (
                    kwargs.get("dtype") is not None
                    # an `out` in the list's dtype is like an input that has it already
                    or ((out := kwargs.get("out")) is not None and (type(out) is not Tensor or out.dtype is not listed))
                )
            )
        ):
            return any_call(*args, **kwargs)
        cast_args, target, in_copies = given, listed, has_copies and _tracing() is None
        i = -1  # enumerate() would take longer
        for a in given:
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
                if dtype in cast_here and (layout := a.layout) is not _MKLDNN and (has_copies or type(given[-1]) is not _dtype):
                    cast_args = list(given) if cast_args is given else cast_args
                    # in a transform a tensor of symbolic sizes has no `nbytes`
                    at_once = in_copies and layout is _strided and (not a.requires_grad or (
                        not _grad_enabled() or _level() is not None or a.nbytes < _LEAST
                        if kind is Tensor
                        else _used_once.get(id(a), number := state.outermost_number) != number and _note_use(id(a), number) is None
                    ))  # fmt: skip
                    cast_args[i] = to(a) if at_once else caster(a, target)
                    continue
            elif (
                -limit <= a <= limit
                if kind is float or kind is int
                else _NUMBERS.issuperset(map(type, a))
                if kind is tuple or kind is list
                else kind in SCALARS
            ):
                continue
            return any_call(*args, **kwargs)
        try:
            if cast_args is given:
                return op(*args, **kwargs)
            return op(*cast_args[: len(args)], **dict(zip(kwargs, cast_args[len(args) :], strict=True))) if kwargs else op(*cast_args)
        except RuntimeError as error:
            result = GIVEN_UP if "out" in kwargs else retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    return fast


def _setitem_wrapper(op: Op, any_call: Op) -> Op:
    """Return the wrapper of `x[index] = value`: torch converts a plain value that fits the range of `x`, others become finite."""

    def set_item(x: Any, index: Any, value: Any) -> Any:
        kind = type(value)
        if type(x) is Tensor:
            dtype = x.dtype
            if kind is Tensor:
                if value.dtype is dtype:
                    return op(x, index, value)
                if (
                    dtype is _float32
                    and value.dtype in _CASTABLE
                    and _BASIC.issuperset(map(type, index if type(index) is tuple else (index,)))
                ):
                    return op(x, index, value)  # tensors as indices take no mixture
            elif (kind is float or kind is int) and dtype in _CASTABLE and -FINITE_MAX[dtype] <= value <= FINITE_MAX[dtype]:
                return op(x, index, value)
        return any_call(x, index, value)

    return set_item


# --- left to torch, unless a kernel is missing ------------------------------------------------------------------------------


def unlisted_wrapper(op: Op, ruled: OpUnderRule, caster: Caster) -> Op:
    """Return the wrapper of an op that is called as it is, and again in float32 if torch raises for want of a kernel.

    After the first such failure each call is checked before `op` is tried. An op that must not run twice is returned itself.
    """
    general = GeneralWrapper(op, ruled, caster)
    any_call, retry, failed = general.wrapper(), general.retry, general.kernels.failed
    if general.kernels.may_lack or not ruled.facts.retries:
        return any_call if general.kernels.may_lack else op

    def unlisted(*args: Any, **kwargs: Any) -> Any:
        if failed:
            return any_call(*args, **kwargs)
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            result = GIVEN_UP if writes(args, kwargs, ruled) else retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    return unlisted


# --- left to torch, unless a number or a mask is beyond the dtype ---------------------------------------------------------------


def guard_wrapper(op: Op, ruled: OpUnderRule, caster: Caster) -> Op:
    """Return the wrapper of unlisted arithmetic in which `(1 - mask) * finfo(float32).min` stays finite in a low-precision dtype."""
    any_call = GeneralWrapper(op, ruled, caster).wrapper()
    return sum_wrapper(op, ruled, any_call) if overflow.is_sum(ruled) else _numbers_wrapper(op, any_call, zero_dim=False)


def fill_wrapper(op: Op, ruled: OpUnderRule, caster: Caster) -> Op:
    """Return the wrapper of an op of which each finite fill or bound beyond the tensor's dtype is moved to its extreme."""

    def fill(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        if dtype is None:
            tensors = list(each_castable((*args, *kwargs.values())))
            filled = [t for t in tensors if t.dim()] or tensors
            if not filled:
                return op(*args, **kwargs)
            dtype = filled[0].dtype if ruled.op != "where" else casting.widest(filled, count_0dim=False)
        if dtype in FINITE_MAX and dtype is not _float32:
            args, kwargs = overflow.bounded(args, kwargs, dtype, overflow.written_scalar)
        return op(*args, **kwargs)

    return _numbers_wrapper(op, fill, zero_dim=True)


def _numbers_wrapper(op: Op, any_call: Op, *, zero_dim: bool) -> Op:
    """Return the wrapper of an op that takes numbers within the dtypes of its plain tensors as it is.

    `zero_dim`: a 0-dim tensor is a number, too.
    """

    def numbers(*args: Any, **kwargs: Any) -> Any:
        if not (kwargs or zero_dim) and _PLAIN.issuperset(map(type, args)):
            return op(*args)
        limit, largest = math.inf, 0.0
        for a in (*args, *kwargs.values()) if kwargs else args:
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                if zero_dim and not a.dim():
                    break
                if (most := FINITE_MAX.get(a.dtype, math.inf)) < limit:
                    limit = most
            elif kind is float or kind is int:
                largest = max(largest, abs(a))
            elif kind is _dtype:
                limit = min(limit, FINITE_MAX.get(a, math.inf))
            elif kind not in SCALARS and not (kind in _SEQUENCES and _NUMBERS.issuperset(map(type, a))):
                break
        else:
            if largest <= limit:
                return op(*args, **kwargs)
        return any_call(*args, **kwargs)

    return numbers


def sum_wrapper(op: Op, ruled: OpUnderRule, any_call: Op) -> Op:
    """Return the wrapper of sums: those of two plain tensors that aren't masks are left to torch here, others to `any_call`."""
    dtypes = _CASTABLE if ruled.dtype is None else {ruled.dtype}
    in_place, most = ruled.facts.in_place, overflow.HARMLESS
    left = casting.INTEGERS | {_float32}  # in place nothing is cast into integers, as where a batch norm counts its batches

    def finite(*args: Any, **kwargs: Any) -> Any:
        if in_place and type(args[0]) in _PLAIN and args[0].dtype in left:
            return op(*args, **kwargs)
        if kwargs or len(args) != 2 or type(args[0]) is not Tensor:
            return any_call(*args, **kwargs)
        a, b = args
        dtype, kind = a.dtype, type(b)
        if dtype not in dtypes:
            return any_call(a, b)
        if kind is float or kind is int:
            has_no_mask = -most[dtype] < b < most[dtype]
        elif kind is not Tensor or b.dtype is not dtype:
            has_no_mask = False
        elif a.requires_grad:
            has_no_mask = dtype is _float32 or (b.requires_grad and a.layout is _strided)
        else:
            has_no_mask = dtype is _float32 or (
                a.is_contiguous()
                and b.is_contiguous()
                and not b.requires_grad
                and (a.numel() == b.numel() or not overflow.overflows(ruled, args, kwargs, dtype))
            )
        return op(a, b) if has_no_mask else any_call(a, b)

    return finite
