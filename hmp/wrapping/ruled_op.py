"""RuledOp: an op with its rule, the base of AnyCall. Which dtype a call gets, and the second try in float32 (R11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..casting import Caster, Tensor, cast_call
from .in_place import in_place_wrapper
from .kernel_fallback import GIVEN_UP, Kernels
from .op_rule import Op, OpRule, chooser, survey


class RuledOp:
    """An op and its rule.

    `dtype_of` gives the dtype for the tensors of a call, `kernels` tells where the op has no kernel, `in_place` is its wrapper for calls
    that write into the first input. `leaves_dtypes`: nothing is cast unless a kernel is missing (R11).
    """

    __slots__ = ("caster", "dtype_of", "in_place", "kernels", "leaves_dtypes", "op", "rule")

    def __init__(self, op: Op, rule: OpRule, caster: Caster) -> None:
        self.op = op
        self.rule = rule
        self.caster = caster
        self.dtype_of = chooser(rule)
        self.kernels = Kernels(rule)
        self.in_place = in_place_wrapper(op, rule, caster)
        self.leaves_dtypes = rule.kind in ("no_kernel", "inside")

    def target(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """The dtype for `tensors` (R1, R2, R3, R7); float32 where that one is known to have no kernel (R11); None where nothing is cast."""
        target = self.dtype_of(tensors)
        if self.kernels.lacks(tensors, target, args, kwargs):
            return torch.float32
        return None if self.leaves_dtypes else target

    def retry(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of the call in float32 after it raised `error` in the low dtype (R11). GIVEN_UP where there is none: the caller, who
        caught `error`, then re-raises it by a bare `raise`."""
        tensors = survey(args, kwargs, self.rule)
        if not tensors:
            return GIVEN_UP

        def run(dtype: torch.dtype) -> Any:
            cast_args, cast_kwargs = cast_call(args, kwargs, dtype, self.caster, self.rule.keep)
            return self.op(*cast_args, **cast_kwargs)

        return self.kernels.retry(error, tensors, self.dtype_of(tensors), args, kwargs, run)
