"""AnyCall runs any call of an op by its rule. `one_dtype` and `unlisted` have faster code for common calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..casting import Caster, Tensor, cast_call, castable, each_tensor, tensor_casts
from ..torch_ops import op_facts
from . import jit_trace, lost_writes, out_argument, refusals, saturation
from .copied_views import Cast, Original, refuse_writes, shares_memory
from .kernel_fallback import GIVEN_UP
from .op_rule import Op, OpRule, flag, survey
from .ruled_op import RuledOp

_REFUSED = object()  # returned in place of a result: torch does not accept the call


class AnyCall(RuledOp):
    """An op under R1, R2, R3, R7 or R11, whichever is its rule; R5, R6 and R12 where the arguments of a call need them."""

    __slots__ = ("_asks_torch_first", "_fills", "_inplace_at", "_out_at", "_takes_scores")

    def __init__(self, op: Op, rule: OpRule, caster: Caster, *, leaves_dtypes: bool = False) -> None:
        super().__init__(op, rule, caster, leaves_dtypes=leaves_dtypes)
        self._out_at = rule.facts.out_at
        self._inplace_at = rule.facts.inplace_at
        self._asks_torch_first = rule.facts.takes_some_mixtures and not rule.kind.is_list
        self._takes_scores, self._fills = saturation.takes_scores(rule), saturation.fills(rule)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call: under R5 where `inplace` is set, under R6 where `out` is given, else under R1, R2, R3 or R7; in float32
        where torch has no kernel for that (R11)."""
        at = self._out_at
        if at is not None and at < len(args):
            args, kwargs = args[:at], {**kwargs, "out": args[at]}
        try:
            if kwargs.get("out") is not None and not self.facts.users:
                return out_argument.call_with_out(self, self.call, args, kwargs)
            if self._inplace_at is not None and flag(args, kwargs, self._inplace_at):
                return self.in_place(*args, **kwargs)
            try:
                return self._out_of_place(args, kwargs)
            except RuntimeError as error:
                result = self.retry(error, args, kwargs)
                if result is GIVEN_UP:
                    raise
                return result
        except refusals.OF_CASTS as error:
            if not refusals.is_cast_refusal(error, (args, kwargs)):
                raise
        return self.op(*args, **kwargs)

    def wrapper(self) -> Op:
        """A function that sends every call of the op through `call`."""
        call = self.call
        return lambda *args, **kwargs: call(args, kwargs)

    def _out_of_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that writes into no argument: all castable inputs get one dtype (R1, R2, R3, R7), in which scalars stay
        finite (R12)."""
        op, rule, facts = self.op, self.rule, self.facts
        tensors = survey(args, kwargs, rule)
        if not tensors:
            if self._takes_scores:
                args = saturation.scores_in_explicit_dtype(args, kwargs)
            return op(*args, **kwargs)
        target = self.target(tensors, args, kwargs)
        if target is None:
            return op(*args, **kwargs)
        if self.is_arithmetic and target is not torch.float32 and saturation.overflowing(args, kwargs, target):
            return saturation.saturated(op, args, kwargs, target)
        if self._fills:
            args, kwargs = saturation.bounded(args, kwargs, target)
        if not [t for t in tensors if t.dtype is not target]:
            return op(*args, **kwargs)
        # `target` is another dtype where the first input's is known to have no kernel (R11)
        if self._asks_torch_first and target is tensors[0].dtype:
            result = self._by_torch(tensors, args, kwargs)
            if result is not _REFUSED:
                return result
        cast_args, cast_kwargs = cast_call(args, kwargs, target, self.caster, facts.keep)
        if facts.users:
            return lost_writes.call(op, rule.op, (cast_args, cast_kwargs), (args, kwargs), facts.order)
        result = op(*cast_args, **cast_kwargs)
        if not facts.view:
            return result
        return refusing_writes(result, self, (cast_args, cast_kwargs), (args, kwargs))

    def _by_torch(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """R7: what torch itself returns for inputs of different dtypes; _REFUSED where it raises, or where that cannot be known."""
        if not _check_is_reliable(tensors, self.rule, args, kwargs):
            return _REFUSED
        if not refusals.users_python_sees(tensors):
            try:
                return self.op(*args, **kwargs)
            except RuntimeError as error:
                if not refusals.is_dtype_refusal(error):
                    raise
                jit_trace.resume()
        elif self.facts.retries and refusals.torch_accepts(self.op, args, kwargs, tensors):
            return self.op(*args, **kwargs)
        return _REFUSED


def _check_is_reliable(tensors: list[Tensor], rule: OpRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether torch's answer to a mixture of dtypes can be trusted (R7): some kernels alone check, and meta or empty tensors run none."""
    if rule.op not in op_facts.REFUSED_BY_KERNELS_ALONE or all(tensor_casts.has_values(t) and t.numel() for t in tensors):
        return True
    # a target of probabilities may be in another dtype than the scores, on every device
    return rule.op == "cross_entropy" and castable(args[1] if len(args) > 1 else kwargs.get("target"))


def refusing_writes(result: Any, ruled: RuledOp, cast: tuple[Any, Any], call: tuple[Any, Any]) -> Any:
    """`result`, such that writes into it raise where it is a view of cast copies, or one of them (R10)."""
    copied = [(new, old) for new, old in zip(each_tensor(cast), each_tensor(call), strict=True) if new is not old]
    copies = [new for new, _ in copied]
    if not copies or not shares_memory(result, copies):
        return result
    original = Original(ruled.op, *call, copied[0][1].dtype, Cast(old for _, old in copied))
    return refuse_writes(result, ruled.rule.op, copies, original)
