"""Wrapper of a product on the FP8 list: it runs in FP8 where it can, else in the low dtype, as on the BF16 list."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..casting import Caster
from ..fp8 import E4M3, PRODUCTS, RECIPES, why_not
from . import kernel_fallback
from .fixed_dtype import fixed_dtype_wrapper
from .op_rule import Op, OpRule

_compiling = torch.compiler.is_dynamo_compiling


def fp8_product(rule: OpRule) -> Op:
    """The product of the rule's op in FP8, with the op's own arguments."""
    recipe, kernel = rule.fp8
    made = functools.partial(PRODUCTS[rule.op], recipe=RECIPES[recipe], low=rule.low, kernel=kernel)
    made.computes = E4M3  # type: ignore[attr-defined]  # of both inputs, under every recipe; for reports, they arrive in another dtype
    return made


def fp8_product_wrapper(op: Op, product: Op, rule: OpRule, caster: Caster) -> Op:
    """A function that calls `product` with the inputs as they are: it quantises them itself, from whatever dtype they have. A call that
    cannot run in FP8 is one of `op` in the low dtype, and counted with the reason."""
    in_low = fixed_dtype_wrapper(op, rule, caster)
    recipe = RECIPES[rule.fp8[0]]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        reason = why_not(rule.op, args, kwargs, recipe, rule.low)
        if not reason:
            return product(*args, **kwargs)
        if not _compiling():
            kernel_fallback.count_not_in_fp8(rule.op, reason)
        return in_low(*args, **kwargs)

    return wrapper
