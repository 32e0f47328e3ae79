"""An op with the rule for it: what every way of calling it needs, and the second try in float32 (R11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..casting import Caster, Tensor, cast_call
from .in_place import in_place_wrapper
from .kernel_fallback import GIVEN_UP, Kernels
from .op_rule import Op, OpRule, chooser, survey


class RuledOp:
    """An op, the rule for it, what casts its inputs, which dtype they get, what is known of its kernels, and the op in place.

    `leaves_dtypes` is whether torch computes it as it finds it, but where it has no kernel.
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
        """R1, R2, R3, R7: the dtype for `tensors`; float32 where theirs has no kernel (R11). None for a call that stays as it is."""
        target = self.dtype_of(tensors)
        if self.kernels.lacks(tensors, target, args, kwargs):
            return torch.float32
        return None if self.leaves_dtypes else target

    def again(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """R11: what torch refused in the low dtype is tried in float32. GIVEN_UP where nothing comes of that: whoever caught `error` then
        raises it by a bare `raise`, as it is and once."""
        tensors = survey(args, kwargs, self.rule)
        if not tensors:
            return GIVEN_UP

        def run(dtype: torch.dtype) -> Any:
            cast_args, cast_kwargs = cast_call(args, kwargs, dtype, self.caster, self.rule.keep)
            return self.op(*cast_args, **cast_kwargs)

        return self.kernels.retry(error, tensors, self.dtype_of(tensors), args, kwargs, run)
