"""op_wrap(): one torch function becomes the function that casts its inputs by one rule, and calls it.

Every decision that does not depend on the call's tensors is taken here, when the wrapper is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..caches import cast_cache
from ..casting import FINITE_MAX, Caster, Tensor, cast_call, castable, deliver, each_castable, each_tensor, tensor_casts
from ..context import without_casts
from ..ops import op_facts
from . import autocast_inside, jit_trace, norms_and_lookups, refusals, saturation
from .copied_views import Original, refuse_writes
from .kernel_fallback import GIVEN_UP, Kernels
from .op_rule import CallRule, Observer, Op, survey

Parameter = torch.nn.Parameter
_SCALARS = frozenset({bool, str, type(None), torch.device, torch.layout, torch.Generator})
_NUMBERS = frozenset({int, float, bool})


def op_wrap(op: Op, rule: CallRule, observer: Observer | None = None) -> Op:
    """The function that calls `op` with its tensors cast by `rule`; with an observer, one that tells it as well."""
    caster: Caster = tensor_casts.cast
    if rule.op in op_facts.PRODUCTS:
        caster = cast_cache.cast_product_input
    elif rule.op in op_facts.RECURRENT:
        caster = cast_cache.cast_weights
    elif rule.score_taker:
        caster = tensor_casts.cast_finite
    elif rule.mask_taker or rule.arithmetic:
        caster = tensor_casts.cast_saturating if rule.mask_taker else tensor_casts.cast_saturating_0dim
    inner = without_casts(op) if rule.composite else op
    if rule.asks_torch_first and not refusals.is_torchs_function(op):
        rule = rule._replace(asks_torch_first=False)  # what somebody put in torch's place is the user's Python, and called once
    if observer is not None:
        caster = observer.casting(caster)
        inner = observer.calling(inner, rule)
    special = norms_and_lookups.BUILDERS.get(rule.op) if rule.kind in ("bf16", "fp32", "promote", "first") else None
    if special is not None:
        wrapper = special(inner, rule.op, rule.order, _chooser(rule), caster)
    elif rule.kind == "inside":
        wrapper = _cast(inner, rule, caster) if rule.retries else inner
    elif rule.kind == "autocast":
        wrapper = autocast_inside.wrapper(inner, inner if rule.unlisted is None else op_wrap(op, rule.unlisted), rule)
    elif rule.kind == "in_place":
        wrapper = _in_place(inner, rule, caster)
    elif rule.kind == "no_kernel_in_place":
        wrapper = _in_place_without_kernel(inner, rule)
    elif rule.kind == "mask_in_place":
        wrapper = saturation.mask_in_place_wrapper(inner)
    elif rule.kind == "fill":
        wrapper = saturation.fill_wrapper(inner, rule)
    elif rule.kind in ("guard", "guard_in_place"):
        wrapper = saturation.guard_wrapper(inner, rule)
    else:
        wrapper = _cast(inner, rule, caster)
    return wrapper if observer is None else observer.around(wrapper, rule)


def _chooser(rule: CallRule) -> Callable[[list[Tensor]], torch.dtype]:
    """What the rule makes of castable tensors, given in the order of the op's parameters; there is at least one."""
    if rule.kind == "bf16":
        return lambda tensors: rule.low
    if rule.kind == "fp32":
        return lambda tensors: torch.float32
    if rule.kind == "first":
        return lambda tensors: tensors[0].dtype
    if rule.kind in ("no_kernel", "inside"):  # the low dtype in play, which a kernel may not take
        return lambda tensors: next((t.dtype for t in tensors if t.dtype is not torch.float32), torch.float32)
    return lambda tensors: tensor_casts.widest(tensors, count_0dim=rule.join)


def _cast(op: Op, rule: CallRule, caster: Caster) -> Op:
    """R1, R2, R3, R7 and R11: out-of-place ops whose castable inputs get one dtype."""
    fixed = {"bf16": rule.low, "fp32": torch.float32}.get(rule.kind)
    quiet_limit = FINITE_MAX[fixed or torch.float16]
    in_place = _in_place(op, rule, caster)
    as_found = rule.kind in ("no_kernel", "inside")  # torch computes it, but for R11
    kernels = Kernels(rule)
    failed = kernels.failed
    target_of = _chooser(rule)

    def general(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = rule.out_at
        if at is not None and at < len(args):
            args, kwargs = args[:at], {**kwargs, "out": args[at]}
        try:
            if kwargs.get("out") is not None and not rule.writes_out_itself:
                return learning(args, kwargs)
            if rule.inplace_at is not None and _flag(args, kwargs, rule.inplace_at):
                return in_place(*args, **kwargs)
            try:
                return out_of_place(args, kwargs)
            except RuntimeError as error:
                result = again(error, args, kwargs)
                if result is GIVEN_UP:
                    raise
                return result
        except (TypeError, NotImplementedError) as error:
            if not refusals.is_of_a_cast(error, (args, kwargs)):
                raise
        return op(*args, **kwargs)

    def learning(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """R6 and R11: whether `out` was refused or a kernel is missing, a run without `out` tells."""
        try:
            return into_out(args, kwargs)
        except RuntimeError as error:
            known = len(failed)
            if rule.retries and refusals.is_of_a_dtype(error):
                jit_trace.resume()
                try:
                    general(args, {name: value for name, value in kwargs.items() if name != "out"})
                except RuntimeError as second:
                    if not refusals.is_torchs_own(second):
                        raise
                    jit_trace.resume()
            if len(failed) == known:
                raise
            return into_out(args, kwargs)

    def again(error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """R11: what torch refused in the low dtype is tried in float32; GIVEN_UP where nothing comes of that."""
        tensors = survey(args, kwargs, rule)
        if not tensors:
            return GIVEN_UP

        def run(dtype: torch.dtype) -> Any:
            cast_args, cast_kwargs = cast_call(args, kwargs, dtype, caster, rule.keep)
            return op(*cast_args, **cast_kwargs)

        return kernels.retry(error, tensors, target_of(tensors), args, kwargs, run)

    def out_of_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = survey(args, kwargs, rule)
        if not tensors:
            if rule.score_taker:
                args = saturation.scores_in_explicit_dtype(args, kwargs)
            return op(*args, **kwargs)
        target = target_of(tensors)
        lacking = kernels.lacks(tensors, target, args, kwargs)
        if lacking:
            target = torch.float32
        elif as_found:
            return op(*args, **kwargs)
        if rule.arithmetic and target is not torch.float32 and saturation.overflowing(args, kwargs, target):
            return saturation.saturated(op, args, kwargs, target)
        if rule.fill:
            args, kwargs = saturation.bounded(args, kwargs, target)
        if all(t.dtype is target for t in tensors):
            return op(*args, **kwargs)
        if rule.asks_torch_first and not lacking and _torch_knows(tensors, rule, args, kwargs):
            # where torch refuses the mixture R7 gives it one dtype
            if not refusals.users_python_sees(tensors):
                try:
                    return op(*args, **kwargs)
                except RuntimeError as error:
                    if not refusals.is_of_a_dtype(error):
                        raise
                    jit_trace.resume()
            elif rule.retries and refusals.torch_takes(op, args, kwargs, tensors):
                return op(*args, **kwargs)
        cast_args, cast_kwargs = cast_call(args, kwargs, target, caster, rule.keep)
        result = op(*cast_args, **cast_kwargs)
        if not rule.view:
            return result
        cast_tensors = each_tensor((cast_args, cast_kwargs))
        copies = [new for new, old in zip(cast_tensors, each_tensor((args, kwargs)), strict=True) if new is not old]
        return refuse_writes(result, rule.op, copies, Original(op, args, kwargs, tensors[0].dtype))

    def into_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """R6: the op runs under its rule, and the result arrives in `out` in `out`'s dtype."""
        out: Any = kwargs["out"]
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        tensors = survey(args, rest, rule)
        if not tensors:
            return op(*args, **kwargs)
        first = args[0] if args else None
        if out is first and not (rule.arithmetic and castable(first) and saturation.overflowing(args, rest, first.dtype)):
            # written into its first input: R5
            return op(*args, **kwargs) if rule.mixes_in_place else in_place(*args, **kwargs)
        target = target_of(tensors)
        if kernels.lacks(tensors, target, args, rest):
            target = torch.float32
        elif as_found:
            return op(*args, **kwargs)
        outs = list(each_castable((out,)))
        own = tensor_casts.widest(tensors, count_0dim=True)
        differentiating = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *outs))
        delivered = {t.dtype for t in outs} - {target}
        cast_args, cast_kwargs = cast_call(args, rest, target, caster, rule.keep)
        if rule.arithmetic and target is not torch.float32 and saturation.overflowing(args, rest, target) and not differentiating:
            return deliver(saturation.saturated(op, args, rest, target), out)
        if not delivered or delivered != {own}:
            return op(*cast_args, **cast_kwargs, out=out)  # fits, or is torch's to refuse
        if differentiating:
            return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
        result = deliver(op(*cast_args, **cast_kwargs), out)
        return None if rule.op.endswith("_copy") and isinstance(out, (list, tuple)) else result  # unbind_copy and the like

    if (rule.no_kernel or rule.no_backward_kernel) and fixed is not torch.float32:
        return lambda *args, **kwargs: general(args, kwargs)

    if as_found:

        def unlisted(*args: Any, **kwargs: Any) -> Any:
            if failed:
                return general(args, kwargs)
            try:
                return op(*args, **kwargs)
            except RuntimeError as error:
                result = GIVEN_UP if _writes(args, kwargs, rule) else again(error, args, kwargs)
                if result is GIVEN_UP:
                    raise
                return result

        return unlisted

    if fixed is None:

        def mixed(*args: Any, **kwargs: Any) -> Any:
            if not kwargs and not failed:
                first = None
                for a in args:
                    kind = type(a)
                    if kind is Tensor or kind is Parameter:
                        if first is None:
                            first = a.dtype
                        elif a.dtype is not first:
                            break
                    elif kind not in _SCALARS and kind is not int and kind is not float:
                        break
                else:
                    try:
                        return op(*args)
                    except RuntimeError as error:
                        result = again(error, args, kwargs)
                        if result is GIVEN_UP:
                            raise
                        return result
            return general(args, kwargs)

        if rule.arithmetic or rule.fill:
            return lambda *args, **kwargs: general(args, kwargs)
        mixed.again, mixed.failed = again, failed  # type: ignore[attr-defined]  # for calls that skip the wrapper
        return mixed

    flag_at, out_at, needs_care = rule.inplace_at, rule.out_at, bool(rule.keep) or rule.view

    def uniform(*args: Any, **kwargs: Any) -> Any:
        """The common call, positional arguments and plain tensors, in few steps; everything else goes to `general`."""
        if (
            kwargs
            or failed
            or (flag_at is not None and flag_at < len(args) and args[flag_at])
            or (out_at is not None and out_at < len(args) and args[out_at] is not None)
        ):
            return general(args, kwargs)
        given: Any = args
        for i, a in enumerate(args):
            kind = type(a)
            if kind is Tensor or kind is Parameter:
                dtype = a.dtype
                if dtype is fixed:
                    continue
                if dtype in tensor_casts.CASTABLE and not needs_care and a.layout is not tensor_casts.MKLDNN:
                    if given is args:
                        given = list(args)
                    given[i] = caster(a, fixed)
                elif needs_care or dtype in tensor_casts.LEFT_TO_TORCH:
                    return general(args, kwargs)
            elif kind is float or kind is int:
                if not -quiet_limit <= a <= quiet_limit:
                    return general(args, kwargs)
            elif kind is tuple or kind is list:
                if not _NUMBERS.issuperset(map(type, a)):
                    return general(args, kwargs)
            elif kind not in _SCALARS:
                return general(args, kwargs)
        try:
            return op(*given)
        except RuntimeError as error:
            result = again(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    uniform.again, uniform.failed = again, failed  # type: ignore[attr-defined]  # for calls that skip the wrapper
    return uniform


def _in_place(op: Op, rule: CallRule, caster: Caster) -> Op:
    """R5: the other castable inputs become the first one's dtype, and it is itself never cast."""
    kernels = Kernels(rule)

    def in_place(*args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if rule.writes_out_itself:  # a method's first argument is no tensor
            first = next(each_castable((*args, *kwargs.values())), None)
        tensors = survey(args, kwargs, rule)
        if not castable(first) or tensors is None:
            return op(*args, **kwargs)
        if rule.for_backward and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return op(*args, **kwargs)
        try:
            if kernels.lacks_in_place(first):
                # R11: computed in float32, written into the tensor that it is
                cast_args, cast_kwargs = cast_for(first, torch.float32, args, kwargs)
                return first.copy_(op(*cast_args, **cast_kwargs))
            cast_args, cast_kwargs = cast_for(first, first.dtype, args, kwargs)
            return op(*cast_args, **cast_kwargs)
        except (TypeError, NotImplementedError) as error:
            if not refusals.is_of_a_cast(error, (args, kwargs)):
                raise
        return op(*args, **kwargs)

    def cast_for(first: Tensor, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        if rule.fill:
            # an index is no value: x[70000] = s
            index = args[1:2] if rule.op == "setitem" else ()
            values, kwargs = saturation.bounded(args[1 + len(index) :], kwargs, first.dtype)
            args = (first, *index, *(saturation.mask(a, first.dtype) for a in values)) if args else args
        return cast_call(args, kwargs, dtype, caster, rule.keep)

    return in_place


def _in_place_without_kernel(op: Op, rule: CallRule) -> Op:
    """R5 and R11: torch writes in place, but where it has no kernel for that."""
    in_float32 = _in_place(op, rule, tensor_casts.cast)
    kernels = Kernels(rule)

    def in_place(*args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        return (in_float32 if castable(first) and kernels.lacks_in_place(first) else op)(*args, **kwargs)

    return in_place


def _torch_knows(tensors: list[Tensor], rule: CallRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether torch's answer to a mixture is that of the kernel that will run."""
    if rule.op not in op_facts.REFUSED_BY_KERNELS_ALONE or all(tensor_casts.has_values(t) and t.numel() for t in tensors):
        return True  # of nothing no kernel computes
    # probabilities may be in another dtype than the scores, wherever they are
    return rule.op == "cross_entropy" and castable(args[1] if len(args) > 1 else kwargs.get("target"))


def _writes(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: CallRule) -> bool:
    """Whether the call writes into one of its arguments."""
    at = rule.out_at
    out = args[at] if at is not None and at < len(args) else kwargs.get("out")
    return out is not None or (rule.inplace_at is not None and _flag(args, kwargs, rule.inplace_at))


def _flag(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> bool:
    return bool(args[position] if position < len(args) else kwargs.get("inplace"))
