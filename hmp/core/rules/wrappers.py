"""The wrappers that cast what an op is given: `RuledOp` for a call of any kind, and shorter functions for the usual ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import casting, copies
from ..casting import FINITE_MAX, Caster, Tensor, cast_call, castable, deliver, each_castable
from ..ops import sites, table
from ..torch_private import in_no_transform
from ..torch_private import trace_here as _tracing
from . import lost_writes, refusals, saturation
from .kernel_fallback import GIVEN_UP, Kernels
from .op_rule import SCALARS, Op, OpRule, chooser, flag, survey, writes

_Parameter = torch.nn.Parameter
_dtype = torch.dtype
_MKLDNN = casting.MKLDNN
_NUMBERS = frozenset({int, float, bool})
_SEQUENCES = frozenset({tuple, list})
_BASIC = frozenset({int, slice, type(None), type(Ellipsis)})  # what an index of a view is made of
_CASTABLE = casting.CASTABLE
_HEEDED = casting.LEFT_TO_TORCH | _CASTABLE
# torch's own, taken before anything is patched
_strided, _grad_enabled = torch.strided, torch.is_grad_enabled
_low, _used_once, _LEAST, _LEAST_WITHOUT_GRAPH = copies.low, copies.used_once, copies.LEAST, copies.LEAST_WITHOUT_GRAPH


class RuledOp:
    """An op under R1, R2, R3, R5, R7 or R11, whichever is its rule; R5, R6 and R12 where the arguments of a call need them.

    Args:
        op: The function that is called with the cast arguments.
        rule: The op's rule.
        caster: Casts a tensor.
    """

    def __init__(self, op: Op, rule: OpRule, caster: Caster) -> None:
        self.op, self.rule, self.facts, self.caster = op, rule, rule.facts, caster
        self.kernels = Kernels(rule)
        self.is_arithmetic, self.fills = saturation.is_arithmetic(rule), saturation.fills(rule)
        self.is_sum = saturation.is_sum(rule)
        self._dtype_of = chooser(rule)
        self._takes_scores = saturation.takes_scores(rule)
        self._asks_torch_first = rule.facts.takes_some_mixtures and not rule.kind.is_list
        base = sites.base_of(rule.op)
        takes_mixtures = self.is_arithmetic or rule.op in table.PROMOTED_BY_TORCH
        self._mixes_in_place = takes_mixtures and base not in table.MIXED_INPLACE_RAISES
        self._refused_in_backward = rule.facts.in_place and base in table.MIXED_BACKWARD_RAISES

    def wrapper(self) -> Op:
        """Return the function that takes every call of the op; one whose tensors support no cast is left to torch."""
        return refusals.or_uncast(self.in_place if self.facts.in_place else self._call, self.op)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call: under R5 if `inplace` is set, under R6 if `out` is given, else under the op's rule."""
        at = self.facts.out_at
        if at is not None and at < len(args):
            args, kwargs = args[:at], {**kwargs, "out": args[at]}
        if kwargs.get("out") is not None and not self.facts.users:
            return self._into_out(args, kwargs)
        if self.facts.inplace_at is not None and flag(args, kwargs, self.facts.inplace_at):
            return self.in_place(*args, **kwargs)
        return self._or_in_float32(args, kwargs)

    def _or_in_float32(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._out_of_place(args, kwargs)
        except RuntimeError as error:
            result = self.retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    def _target(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """Return the dtype for `tensors`; float32 where that one is known to have no kernel (R11); None if nothing is cast."""
        target = self._dtype_of(tensors)
        if self.kernels.lacks(tensors, target, args, kwargs):
            return torch.float32
        return None if self.rule.kind.leaves_dtypes else target

    def retry(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the call after it raised `error` in the low-precision dtype: in float32, or of a mixture cast (R11, R7).

        GIVEN_UP without one: the caller, who caught `error`, then re-raises it by a bare `raise`.
        """
        tensors = survey(args, kwargs, self.rule)
        if not tensors:
            return GIVEN_UP

        def run(dtype: torch.dtype) -> Any:
            # through float32: of a tensor that has the dtype already this casts the tangent, which may have another one
            cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, casting.cast, self.facts.keep)
            if dtype is not torch.float32:
                cast_args, cast_kwargs = cast_call(tuple(cast_args), cast_kwargs, dtype, self.caster, self.facts.keep)
            return self.op(*cast_args, **cast_kwargs)

        dtype, leaves_dtypes = self._dtype_of(tensors), self.rule.kind.leaves_dtypes
        first = tensors[0].dtype if leaves_dtypes else dtype
        may_be_mixed = not in_no_transform() or (leaves_dtypes and any(t.dtype is not first for t in tensors))
        return self.kernels.retry(error, tensors, dtype, first if may_be_mixed else None, args, kwargs, run)

    # --- a call that writes into no argument ------------------------------------------------------------------------------

    def _out_of_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call in which all castable inputs get one dtype (R1, R2, R3, R7), and scalars stay finite (R12)."""
        op, rule, facts = self.op, self.rule, self.facts
        tensors = survey(args, kwargs, rule)
        if not tensors:
            if self._takes_scores:
                args = saturation.scores_in_explicit_dtype(args, kwargs)
            return op(*args, **kwargs)
        target = self._target(tensors, args, kwargs)
        if target is None:
            return op(*args, **kwargs)
        if self._overflows(args, kwargs, target):
            return saturation.saturated(op, rule, args, kwargs, target)
        if self.fills:
            args, kwargs = saturation.bounded(args, kwargs, target)
        if all(t.dtype is target for t in tensors):
            return op(*args, **kwargs)
        # `target` is another dtype where the first input's is known to have no kernel
        if self._asks_torch_first and target is tensors[0].dtype and _check_is_reliable(tensors, rule, args, kwargs):
            try:
                return op(*args, **kwargs)
            except RuntimeError as error:
                if not refusals.may_run_again(error, tensors):
                    raise
        cast_args, cast_kwargs = cast_call(args, kwargs, target, self.caster, facts.keep)
        if facts.users:
            return lost_writes.call(op, rule.op, (cast_args, cast_kwargs), (args, kwargs), facts.order)
        return op(*cast_args, **cast_kwargs)

    # --- a call that writes into its first input --------------------------------------------------------------------------

    def in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op with the other castable inputs in the dtype of the first (R5), or in float32 without a kernel (R11)."""
        op, facts = self.op, self.facts
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if facts.users:  # a user's function: the `self` of a method isn't a tensor
            first = next(each_castable((*args, *kwargs.values())), None)
        tensors = survey(args, kwargs, self.rule)
        if not castable(first) or tensors is None:
            return op(*args, **kwargs)
        if self._refused_in_backward and not (_grad_enabled() and any(t.requires_grad for t in tensors)):
            return op(*args, **kwargs)
        if self.kernels.lacks_in_place(first):
            # R11: computed in float32, then written into the input itself
            cast_args, cast_kwargs = self._cast_for(first, torch.float32, args, kwargs)
            return first.copy_(op(*cast_args, **cast_kwargs))
        if self.rule.kind.leaves_dtypes:
            return op(*args, **kwargs)
        cast_args, cast_kwargs = self._cast_for(first, first.dtype, args, kwargs)
        if facts.users:
            return lost_writes.call(op, self.rule.op, (cast_args, cast_kwargs), (args, kwargs), facts.order)
        return op(*cast_args, **cast_kwargs)

    def _cast_for(
        self, first: Tensor, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with castable tensors in `dtype`; the values of a fill stay finite in the dtype of `first` (R12)."""
        if self.fills:
            # an index isn't a value: x[70000] = s
            index = args[1:2] if self.rule.op == "setitem" else ()
            values, kwargs = saturation.bounded(args[1 + len(index) :], kwargs, first.dtype)
            values = tuple(saturation.written_value(a, first.dtype) for a in values)
            args = (first, *index, *values) if args else args
        return cast_call(args, kwargs, dtype, self.caster, self.facts.keep)

    # --- a call with `out=` -----------------------------------------------------------------------------------------------

    def _into_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result in `kwargs["out"]`, which keeps its dtype."""
        op, rule = self.op, self.rule
        out, rest = kwargs["out"], _without_out(kwargs)
        tensors = survey(args, rest, rule)
        if not tensors:
            return op(*args, **kwargs)
        first = args[0] if args else None
        if out is first and not (castable(first) and self._overflows(args, rest, first.dtype)):
            # it writes into its first input: R5
            return op(*args, **kwargs) if self._mixes_in_place else self.in_place(*args, **kwargs)
        target = self._target(tensors, args, rest)
        if target is None:
            return op(*args, **kwargs)
        outs = list(each_castable((out,)))
        differentiating = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *outs))
        cast_args, cast_kwargs = cast_call(args, rest, target, self.caster, self.facts.keep)
        if not differentiating and self._overflows(args, rest, target):
            return deliver(saturation.saturated(op, rule, args, rest, target), out)
        if not self._must_be_copied(tensors, outs, target):
            return op(*cast_args, **cast_kwargs, out=out)  # torch writes into `out`, or raises
        if differentiating:
            return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
        result = deliver(op(*cast_args, **cast_kwargs), out)
        return None if rule.op.endswith("_copy") and isinstance(out, (list, tuple)) else result  # unbind_copy and the like

    def _overflows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
        return self.is_arithmetic and dtype is not torch.float32 and saturation.overflows(self.rule, args, kwargs, dtype)

    def _must_be_copied(self, tensors: list[Tensor], outs: list[Tensor], target: torch.dtype) -> bool:
        """Return True if the result is to be copied into `outs`, of which one has another dtype than the inputs are cast to.

        A listed op takes an `out` of any castable dtype: whether its inputs are low already depends on what ran before. An op on no list
        takes one of its inputs' dtypes, or the one that torch computes in without casts, and torch decides on all others.
        """
        others = {t.dtype for t in outs} - {target}
        if self.rule.kind.is_list:
            return bool(others)
        return bool(others) and others <= {casting.widest(tensors, count_0dim=True), *(t.dtype for t in tensors)}


def _without_out(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "out"}


def _check_is_reliable(tensors: list[Tensor], rule: OpRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if torch's answer to a mixture of dtypes can be trusted (R7): only some kernels check, meta or empty tensors run none."""
    if rule.op not in table.REFUSED_BY_KERNELS_ALONE or all(casting.has_values(t) and t.numel() for t in tensors):
        return True
    # a target of probabilities may be in another dtype than the scores, on every device
    return rule.op == "cross_entropy" and castable(args[1] if len(args) > 1 else kwargs.get("target"))


# --- the makers of wrappers -----------------------------------------------------------------------------------------------


def in_place_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return the wrapper of an op that writes into its first input (R5), and that runs in float32 without a kernel for that (R11)."""
    ruled = RuledOp(op, rule, caster)
    if rule.op == "setitem":
        return _setitem_wrapper(op, ruled.wrapper())
    return ruled.wrapper() if ruled.kernels.may_lack or ruled.fills or rule.facts.users else _fast_wrapper(ruled)


def _setitem_wrapper(op: Op, any_call: Op) -> Op:
    """Return the wrapper of `x[index] = value`: torch converts a plain value that fits the range of `x`, others become finite (R12)."""

    def set_item(x: Any, index: Any, value: Any) -> Any:
        kind = type(value)
        if type(x) is Tensor:
            dtype = x.dtype
            if kind is Tensor:
                if value.dtype is dtype:
                    return op(x, index, value)
                if (
                    dtype is torch.float32
                    and value.dtype in _CASTABLE
                    and _BASIC.issuperset(map(type, index if type(index) is tuple else (index,)))
                ):
                    return op(x, index, value)  # tensors as indices take no mixture
            elif (kind is float or kind is int) and dtype in _CASTABLE and -FINITE_MAX[dtype] <= value <= FINITE_MAX[dtype]:
                return op(x, index, value)
        return any_call(x, index, value)

    return set_item


def unlisted_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return the wrapper of an op that is called as it is, and again in float32 if torch raises for want of a kernel (R11).

    After the first such failure each call is checked before `op` is tried.
    """
    ruled = RuledOp(op, rule, caster)
    call, retry, failed = ruled.wrapper(), ruled.retry, ruled.kernels.failed
    if ruled.kernels.may_lack:
        return call

    def unlisted(*args: Any, **kwargs: Any) -> Any:
        if failed:
            return call(*args, **kwargs)
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            result = GIVEN_UP if writes(args, kwargs, rule) else retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    return unlisted


def composite_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return the wrapper of an op that torch writes in Python, which runs again as a whole (R11); `op` itself if it must not run twice."""
    return unlisted_wrapper(op, rule, caster) if rule.facts.retries else op


def one_dtype_wrapper(op: Op, rule: OpRule, caster: Caster) -> Op:
    """Return the wrapper of an op whose castable inputs get the list's dtype (R1, R2), or the one that they have among them (R3, R7)."""
    ruled, facts = RuledOp(op, rule, caster), rule.facts
    if ruled.is_sum:
        return saturation.sum_wrapper(op, rule, ruled.wrapper())
    needs_care = ruled.is_arithmetic or ruled.fills if rule.dtype is None else facts.users
    return ruled.wrapper() if ruled.kernels.may_lack or needs_care else _fast_wrapper(ruled)


# --- usual calls: plain tensors, positional or by keyword -----------------------------------------------------------------

Retry = Callable[[RuntimeError, tuple[Any, ...]], Any]
_MOST_SPELLINGS = 16  # of calls with keywords: those of a program are few, and one that makes up keywords must not fill the memory


def _fast_wrapper(ruled: RuledOp) -> Op:
    """Return the wrapper for usual calls; any other call is left to the RuledOp."""
    facts = ruled.facts
    takes_all = not facts.keep and facts.inplace_at is None and facts.out_at is None
    has_copies = ruled.caster is copies.low and ruled.rule.dtype is not None
    make = _product if has_copies and takes_all else _one_dtype
    return make(ruled, ruled.op, ruled.wrapper(), lambda error, args: ruled.retry(error, args, {}))


def _by_keyword(
    make: Callable[[RuledOp, Op, Op, Retry], Op], ruled: RuledOp, op: Op, call: Op
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return what takes a call with keywords, and one that `make`'s wrapper does not take.

    For each spelling it has a wrapper of its own, of the op with the keywords' values as positional arguments.
    """
    spellings: dict[tuple[Any, ...], Op] = {}

    def spelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs or ruled.kernels.failed or kwargs.get("dtype") is not None or kwargs.get("inplace"):
            return call(*args, **kwargs)
        if kwargs.get("out") is not None:
            return _into_out(ruled, args, kwargs) if _is_plain_into(ruled, args, kwargs) else call(*args, **kwargs)
        spelling = len(args), *kwargs
        found = spellings.get(spelling)
        if found is None:
            if len(spellings) == _MOST_SPELLINGS or _tracing() is not None:
                return call(*args, **kwargs)
            found = spellings[spelling] = _of_spelling(len(args), tuple(kwargs))
        return found(*args, *kwargs.values())

    def _of_spelling(at: int, names: tuple[str, ...]) -> Op:
        def retry_it(error: RuntimeError, values: tuple[Any, ...]) -> Any:
            return ruled.retry(error, values[:at], dict(zip(names, values[at:], strict=True)))

        return make(ruled, _positional(op, at, names), _positional(call, at, names), retry_it)

    return spelled


def _positional(function: Op, at: int, names: tuple[str, ...]) -> Op:
    """Return `function`, called with positional arguments, those after the first `at` under these names."""

    def called(*values: Any) -> Any:
        return function(*values[:at], **dict(zip(names, values[at:], strict=True)))

    return called


def _is_plain_into(ruled: RuledOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a listed op of plain tensors alone that writes its result into another plain tensor (R6)."""
    if ruled.rule.dtype is None or ruled.facts.keep or len(kwargs) > 1 or not args:
        return False
    tensors = kwargs["out"], *args
    is_plain = all(type(a) is Tensor and a.dtype in _CASTABLE and a.layout is _strided and not a.requires_grad for a in tensors)
    return is_plain and all(a is not tensors[0] for a in args)


def _into_out(ruled: RuledOp, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    op, dtype, caster, out = ruled.op, ruled.rule.dtype, ruled.caster, kwargs["out"]
    assert dtype is not None
    cast_args = [a if a.dtype is dtype else caster(a, dtype) for a in args]
    return op(*cast_args, out=out) if out.dtype is dtype else deliver(op(*cast_args), out)


def _product(ruled: RuledOp, op: Op, call: Op, retry: Retry) -> Op:
    """Return the wrapper of a listed matrix product or convolution, whose inputs may have copies (R18).

    A small activation, and a weight that is used once, is cast without asking for a copy: to ask takes as long as a small cast. In a trace
    a copy is asked for always: torch.jit compares the lines of a trace that was made with gradients with those of one made without.
    """
    target, failed, by_keyword = ruled.rule.dtype, ruled.kernels.failed, _by_keyword(_product, ruled, op, call)
    assert target is not None
    to, limit = casting.widened if target is torch.float32 else casting.TO[target], FINITE_MAX[target]

    def product(*args: Any, **kwargs: Any) -> Any:
        if kwargs or failed or _tracing() is not None:
            return by_keyword(args, kwargs)
        grad = _grad_enabled()
        cast_args = []
        for a in args:
            kind = type(a)
            if kind is Tensor or kind is _Parameter:
                dtype = a.dtype
                if dtype is not target and dtype in _HEEDED:
                    if dtype not in _CASTABLE or a.layout is not _strided:
                        return call(*args)
                    if kind is Tensor:
                        is_small = a.nbytes < (_LEAST if grad and a.requires_grad else _LEAST_WITHOUT_GRAPH)
                    else:
                        is_small = id(a) in _used_once
                    a = to(a) if is_small else _low(a, target)
            elif not (
                -limit <= a <= limit
                if kind is int or kind is float
                else kind in SCALARS or (kind in _SEQUENCES and _NUMBERS.issuperset(map(type, a)))
            ):
                return call(*args)
            cast_args.append(a)
        try:
            return op(*cast_args)
        except RuntimeError as error:
            if (result := retry(error, args)) is GIVEN_UP:
                raise
            return result

    return product


def _one_dtype(ruled: RuledOp, op: Op, call: Op, retry: Retry) -> Op:
    """Return the wrapper that casts where the list says the dtype, else checks that all tensors have the same dtype."""
    # local variables: a call reads them faster than attributes
    rule, caster, failed, by_keyword = ruled.rule, ruled.caster, ruled.kernels.failed, _by_keyword(_one_dtype, ruled, op, call)
    # None: the dtype of the first tensor, where all have it. Rules by which scalars saturate never come here then
    listed: Any = rule.dtype
    is_listed, limit = listed is not None, math.inf if listed is None else FINITE_MAX[listed]
    may_write = rule.facts.inplace_at is not None or rule.facts.out_at is not None
    # a RuledOp finds what dtype tensors have among them, and casts for an op with inputs that are never cast
    cast_here = _CASTABLE if is_listed and not rule.facts.keep else frozenset()

    def one_dtype(*args: Any, **kwargs: Any) -> Any:
        if kwargs or failed or (may_write and writes(args, kwargs, rule)):
            return by_keyword(args, kwargs)
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
            return call(*args)
        try:
            return op(*cast_args)
        except RuntimeError as error:
            result = retry(error, args)
            if result is GIVEN_UP:
                raise
            return result

    return one_dtype
