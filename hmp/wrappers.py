"""op_wrap(): one torch function becomes the function that casts its inputs by one rule, and calls it.

Every decision that does not depend on the call's tensors is taken here, when the wrapper is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from . import casting, special_ops, state
from .casting import FINITE_MAX, Caster, Tensor, cast_call, castable, each_castable, each_tensor
from .views import refuse_writes

Op = Callable[..., Any]
Kind = Literal["bf16", "fp32", "promote", "first", "in_place", "mask_in_place", "fill", "guard", "guard_in_place", "inside"]
Parameter = torch.nn.Parameter
_alias_copy = torch.alias_copy
_SCALARS = frozenset({bool, str, type(None), torch.device, torch.layout, torch.Generator})
_NUMBERS = frozenset({int, float, bool})
_SMALLEST_LIMIT = FINITE_MAX[torch.float16]


@dataclass(frozen=True)
class CallRule:
    """What op_wrap needs to know of an op and of the rule for it.

    `kind` is the list that the op is on, or for an unlisted op what R5, R7, R8 or R12 ask for; `keep` are positions and
    keywords that are never cast; `order` are the positional parameters' names; `inplace_at` and `out_at` are the positions
    of those parameters in a Python function.
    """

    op: str
    kind: Kind
    low: torch.dtype = torch.bfloat16
    keep: frozenset[int | str] = frozenset()
    order: tuple[str, ...] = ()
    inplace_at: int | None = None
    out_at: int | None = None
    composite: bool = False
    view: bool = False
    join: bool = False
    mask_taker: bool = False
    arithmetic: bool = False
    fill: bool = False
    asks_torch_first: bool = False
    mixes_in_place: bool = True


class Observer(Protocol):
    """Sees every decision: its casters stand in for the plain ones, and its functions around the wrappers."""

    def casting(self, caster: Caster) -> Caster: ...

    def around(self, wrapper: Op, rule: CallRule) -> Op: ...


def op_wrap(op: Op, rule: CallRule, observer: Observer | None = None) -> Op:
    """The function that calls `op` with its tensors cast by `rule`; with an observer, one that tells it as well."""
    caster: Caster = casting.cast
    if rule.mask_taker or rule.arithmetic:
        caster = casting.cast_saturating if rule.mask_taker else casting.cast_saturating_0dim
    if observer is not None:
        caster = observer.casting(caster)
    inner = without_casts_inside(op) if rule.composite else op
    special = special_ops.BUILDERS.get(rule.op) if rule.kind in ("bf16", "fp32", "promote", "first") else None
    if special is not None:
        wrapper = special(inner, rule.op, rule.order, _chooser(rule), caster)
    elif rule.kind == "inside":
        wrapper = inner
    elif rule.kind == "in_place":
        wrapper = _in_place(inner, rule, caster)
    elif rule.kind == "mask_in_place":
        wrapper = _mask_in_place(inner)
    elif rule.kind == "fill":
        wrapper = _fill(inner, rule)
    elif rule.kind in ("guard", "guard_in_place"):
        wrapper = _guard(inner, rule)
    else:
        wrapper = _cast(inner, rule, caster)
    return wrapper if observer is None else observer.around(wrapper, rule)


def without_casts_inside(op: Op) -> Op:
    """`op`, with casts off for what its own Python code calls: one op, one decision (R8)."""
    get, put, settle = state.get, state.put, state.settle

    def inside(*args: Any, **kwargs: Any) -> Any:
        before = get()
        put((before or settle()).off)
        try:
            return op(*args, **kwargs)
        finally:
            put(before)

    return inside


def _chooser(rule: CallRule) -> Callable[[list[Tensor]], torch.dtype]:
    """What the rule makes of castable tensors, given in the order of the op's parameters; there is at least one."""
    if rule.kind == "bf16":
        return lambda tensors: rule.low
    if rule.kind == "fp32":
        return lambda tensors: torch.float32
    if rule.kind == "first":
        return lambda tensors: tensors[0].dtype
    return lambda tensors: casting.widest(tensors, count_0dim=rule.join)


def _cast(op: Op, rule: CallRule, caster: Caster) -> Op:
    """R1, R2, R3 and R7: out-of-place ops whose castable inputs get one dtype."""
    fixed = {"bf16": rule.low, "fp32": torch.float32}.get(rule.kind)
    quiet_limit = FINITE_MAX[fixed or torch.float16]
    in_place = _in_place(op, rule, caster)

    target_of = _chooser(rule)

    def general(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = rule.out_at
        if at is not None and at < len(args):
            args, kwargs = args[:at], {**kwargs, "out": args[at]}
        if kwargs.get("out") is not None:
            return into_out(args, kwargs)
        if rule.inplace_at is not None and _flag(args, kwargs, rule.inplace_at):
            return in_place(*args, **kwargs)
        tensors = survey(args, kwargs, rule)
        if not tensors:
            return op(*args, **kwargs)
        target = target_of(tensors)
        if rule.arithmetic and target is not torch.float32 and _overflowing(args, kwargs, target):
            return _saturated(op, args, kwargs, target)
        if rule.fill:
            args, kwargs = _bounded(args, kwargs, target)
        if all(t.dtype is target for t in tensors):
            return _call(op, args, kwargs, tensors)
        if rule.asks_torch_first:
            try:
                return op(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError):
                pass  # torch refuses the mixture: R7 gives it one dtype; another error comes again below
        cast_args, cast_kwargs = cast_call(args, kwargs, target, caster, rule.keep)
        result = _call(op, tuple(cast_args), cast_kwargs, tensors)
        return refuse_writes(result, rule.op) if rule.view else result

    def into_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """R6: the op runs under its rule, and the result arrives in `out` in `out`'s dtype."""
        out: Any = kwargs["out"]
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        tensors = survey(args, rest, rule)
        if not tensors:
            return op(*args, **kwargs)
        first = args[0] if args else None
        if out is first and not (rule.arithmetic and castable(first) and _overflowing(args, rest, first.dtype)):
            # written into its first input: R5
            return op(*args, **kwargs) if rule.mixes_in_place else in_place(*args, **kwargs)
        target = target_of(tensors)
        outs = list(each_castable((out,)))
        own = casting.widest(tensors, count_0dim=True)
        differentiating = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *outs))
        delivered = {t.dtype for t in outs} - {target}
        cast_args, cast_kwargs = cast_call(args, rest, target, caster, rule.keep)
        if rule.arithmetic and target is not torch.float32 and _overflowing(args, rest, target) and not differentiating:
            return _deliver(_saturated(op, args, rest, target), out)
        if not delivered or delivered != {own}:
            return op(*cast_args, **cast_kwargs, out=out)  # fits, or is torch's to refuse
        if differentiating:
            return op(*args, **kwargs)  # torch's own error: out= takes no part in autograd
        result = op(*cast_args, **cast_kwargs)
        if isinstance(out, Tensor):
            return _deliver(result, out)
        delivered_to = [_deliver(part, place) for part, place in zip(result, out, strict=True)]
        return getattr(torch.return_types, type(result).__name__ + "_out", type(result))(delivered_to)

    if fixed is None:

        def mixed(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:
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
                    return op(*args)
            return general(args, kwargs)

        return mixed if not (rule.arithmetic or rule.fill) else lambda *args, **kwargs: general(args, kwargs)

    flag_at, out_at, needs_care = rule.inplace_at, rule.out_at, bool(rule.keep) or rule.view

    def uniform(*args: Any, **kwargs: Any) -> Any:
        """The common call, positional arguments and plain tensors, in few steps; everything else goes to `general`."""
        if kwargs or (flag_at is not None and args[flag_at]) or (out_at is not None and out_at < len(args) and args[out_at] is not None):
            return general(args, kwargs)
        casting_needed = False
        for a in args:
            kind = type(a)
            if kind is Tensor or kind is Parameter:
                if a.dtype is not fixed:
                    if needs_care or a.dtype in casting.LEFT_TO_TORCH:
                        return general(args, kwargs)
                    casting_needed = True
            elif kind is float or kind is int:
                if not -quiet_limit <= a <= quiet_limit:
                    return general(args, kwargs)
            elif kind is tuple or kind is list:
                if not _NUMBERS.issuperset(map(type, a)):
                    return general(args, kwargs)
            elif kind not in _SCALARS:
                return general(args, kwargs)
        if not casting_needed:
            return op(*args)
        return op(*[caster(a, fixed) if isinstance(a, Tensor) and a.dtype is not fixed and castable(a) else a for a in args])

    return uniform


def _in_place(op: Op, rule: CallRule, caster: Caster) -> Op:
    """R5: the other castable inputs become the first one's dtype, and it is itself never cast."""

    def in_place(*args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not castable(first) or survey(args, kwargs, rule) is None:
            return op(*args, **kwargs)
        if rule.fill:
            args, kwargs = _bounded(args, kwargs, first.dtype)
            args = tuple(_mask(a, first.dtype) for a in args)
        cast_args, cast_kwargs = cast_call(args, kwargs, first.dtype, caster, rule.keep)
        return op(*cast_args, **cast_kwargs)

    return in_place


def _mask_in_place(op: Op) -> Op:
    """R12: a float32 mask that is added in place to low-dtype scores keeps its finite values finite; torch computes the rest."""

    def mask_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        if castable(self) and self.dtype is not torch.float32:
            args = tuple(_mask(a, self.dtype) for a in args)
            kwargs = {name: _mask(a, self.dtype) for name, a in kwargs.items()}
        return op(self, *args, **kwargs)

    return mask_in_place


def _fill(op: Op, rule: CallRule) -> Op:
    """R12: a finite fill or bound beyond the tensor's dtype becomes that dtype's finite extreme."""

    def fill(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        if dtype is None:
            tensors = list(each_castable((*args, *kwargs.values())))
            filled = [t for t in tensors if t.dim()] or tensors
            if not filled:
                return op(*args, **kwargs)
            dtype = filled[0].dtype if rule.op != "where" else casting.widest(filled, count_0dim=False)
        if dtype in FINITE_MAX and dtype is not torch.float32:
            args, kwargs = _bounded(args, kwargs, dtype)
            args = tuple(_mask(a, dtype) if isinstance(a, Tensor) and a.dim() == 0 else a for a in args)
            kwargs = {k: _mask(a, dtype) if isinstance(a, Tensor) and a.dim() == 0 else a for k, a in kwargs.items()}
        return op(*args, **kwargs)

    return fill


def _guard(op: Op, rule: CallRule) -> Op:
    """R12 for unlisted multiplication: `(1 - mask) * finfo(float32).min` stays finite in a low dtype."""

    def guard(*args: Any, **kwargs: Any) -> Any:
        for a in args:
            kind = type(a)
            if kind is float or kind is int:
                if not -_SMALLEST_LIMIT <= a <= _SMALLEST_LIMIT:
                    break
            elif kind is not Tensor and kind is not Parameter:
                break
        else:
            if not kwargs:
                return op(*args)
        tensors = survey(args, kwargs, rule)
        dtype = casting.widest(tensors, count_0dim=False) if tensors else None
        if dtype is None or dtype is torch.float32 or not _overflowing(args, kwargs, dtype):
            return op(*args, **kwargs)
        if kwargs.get("out") is not None:
            return _deliver(_saturated(op, args, {n: v for n, v in kwargs.items() if n != "out"}, dtype), kwargs["out"])
        if rule.kind == "guard":
            return _saturated(op, args, kwargs, dtype)
        first = args[0]
        result = _saturated(op, (first.clone(), *args[1:]), kwargs, dtype)
        return first.copy_(result)

    return guard


def survey(args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: CallRule) -> list[Tensor] | None:
    """The castable tensors that the rule may cast, in the order of the op's parameters; None where the op is left to torch:
    a float64 or complex tensor among the inputs, or an explicit dtype."""
    found: list[Tensor] = []
    keep = rule.keep
    for i, value in enumerate(args):
        if type(value) is torch.dtype or (i not in keep and not _collect(value, found)):
            return None
    names = kwargs if len(kwargs) < 2 or not rule.order else sorted(kwargs, key=lambda n: rule.order.index(n) if n in rule.order else 99)
    for name in names:
        value = kwargs[name]
        if type(value) is torch.dtype or (name not in keep and not _collect(value, found)):
            return None
    return found


def _collect(value: Any, found: list[Tensor]) -> bool:
    """Adds the castable tensors in `value` to `found`; False when there is one that leaves the op to torch."""
    if not isinstance(value, (Tensor, list, tuple, dict)):
        return True
    for tensor in each_tensor((value,)):
        if tensor.dtype in casting.LEFT_TO_TORCH:
            return False
        if castable(tensor):
            found.append(tensor)
    return True


def _call(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    """The op's result; with casts off inside where a tensor subclass runs Python of its own for the op (R8)."""
    for t in tensors:
        if type(t) is not Tensor and type(t) is not Parameter and type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return state.call_without_casts(op, *args, **kwargs)
    return op(*args, **kwargs)


def _flag(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> bool:
    return bool(args[position] if position < len(args) else kwargs.get("inplace"))


def _overflowing(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    return any(casting.overflows(value, dtype) for value in (*args, *kwargs.values()))


def _saturated(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The op computed in float32, finite results moved inside the low dtype (R12)."""
    cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, casting.cast)
    result = op(*cast_args, **cast_kwargs)
    return casting.cast(casting.within(result, dtype), dtype) if castable(result) else result


def _bounded(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (
        tuple(casting.finite_scalar(a, dtype) for a in args),
        {name: casting.finite_scalar(a, dtype) for name, a in kwargs.items()},
    )


def _mask(value: Any, dtype: torch.dtype) -> Any:
    """A castable operand that needs no gradient, its finite values inside `dtype`; anything else as it is."""
    return casting.within(value, dtype) if castable(value) and not value.requires_grad else value


def _deliver(result: Any, out: Tensor) -> Tensor:
    """Writes `result` into `out` with torch's rules for resizing, and gives `out` back."""
    with torch.no_grad():
        value = casting.cast(result, out.dtype) if castable(result) and castable(out) else result
        _alias_copy(value, out=out)
    return out
