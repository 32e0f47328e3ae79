"""RuledOp: an op with its rule, the base of AnyCall. Which dtype a call gets, and the second try in float32 (R11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..casting import Caster, Tensor, cast_call
from ..torch_ops import op_facts, sites
from . import saturation
from .in_place import in_place_wrapper
from .kernel_fallback import GIVEN_UP, Kernels
from .op_rule import Op, OpRule, chooser, survey


class RuledOp:
    """An op and its rule.

    `dtype_of` gives the dtype for the tensors of a call, `kernels` tells where the op has no kernel, `in_place` is its wrapper for calls
    that write into the first input, and `mixes_in_place` whether torch takes other dtypes there. `leaves_dtypes`: nothing is cast unless a
    kernel is missing (R11).
    """

    __slots__ = ("caster", "dtype_of", "facts", "in_place", "is_arithmetic", "kernels", "leaves_dtypes", "mixes_in_place", "op", "rule")

    def __init__(self, op: Op, rule: OpRule, caster: Caster, *, leaves_dtypes: bool = False) -> None:
        self.op = op
        self.rule = rule
        self.facts = rule.facts
        self.caster = caster
        self.dtype_of = chooser(rule)
        self.kernels = Kernels(rule)
        self.in_place = in_place_wrapper(op, rule, caster)
        self.leaves_dtypes = leaves_dtypes
        self.is_arithmetic = saturation.is_arithmetic(rule)
        takes_mixtures = self.is_arithmetic or rule.op in op_facts.PROMOTED_BY_TORCH
        self.mixes_in_place = takes_mixtures and sites.base_of(rule.op) not in op_facts.MIXED_INPLACE_RAISES

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
            cast_args, cast_kwargs = cast_call(args, kwargs, dtype, self.caster, self.facts.keep)
            return self.op(*cast_args, **cast_kwargs)

        return self.kernels.retry(error, tensors, self.dtype_of(tensors), args, kwargs, run)
