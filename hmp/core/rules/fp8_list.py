"""Wrapper of a product on the FP8 list: it runs in FP8 where it can, else in the low-precision dtype, as on the BF16 list."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..active import without_casts
from ..casting import Caster
from ..fp8 import E4M3, PRODUCTS, RECIPES, why_not
from . import kernel_fallback
from .op_rule import Op, OpRule
from .wrappers import one_dtype_wrapper

_compiling = torch.compiler.is_dynamo_compiling
_counted = threading.local()  # the ops whose calls, counted as not in FP8, are running in this thread


def product(op: str, recipe: str, low_dtype: torch.dtype, kernel: str, *args: Any, **kwargs: Any) -> Any:
    """Return the product of `op` in FP8, with the op's own arguments after what it is computed with.

    All of that are constants to a compiler.
    """
    return PRODUCTS[op](*args, recipe=RECIPES[recipe], low_dtype=low_dtype, kernel=kernel, **kwargs)


def fp8_product(rule: OpRule, inlined: Callable[..., Any] | None) -> Op:
    """Return the product of the rule's op in FP8, with the op's own arguments.

    What it calls is not decided again (R8): torch's decompositions are Python, and would call the op that they are of. In compiled code
    `inlined` has the compiler trace it as it traces user code, with its autograd.Function; else its steps would be differentiated.
    """
    run = without_casts(product) if inlined is None else functools.partial(inlined, product)
    made = functools.partial(run, rule.op, rule.fp8[0], rule.low_dtype, rule.fp8[1])
    made.computes = E4M3  # type: ignore[attr-defined]  # of both inputs, under every recipe; for reports, they arrive in another dtype
    return made


def fp8_product_wrapper(op: Op, rule: OpRule, caster: Caster, in_fp8: Op) -> Op:
    """Return a function that calls `in_fp8` with the inputs as they are: it quantises them itself, from whatever dtype they have.

    A call that cannot run in FP8 is one of `op` in the low-precision dtype, and counted with the reason.
    """
    in_low = one_dtype_wrapper(op, rule, caster)
    recipe = RECIPES[rule.fp8[0]]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        reason = why_not(rule.op, args, kwargs, recipe, rule.low_dtype)
        if not reason:
            return in_fp8(*args, **kwargs)
        if _compiling():
            return in_low(*args, **kwargs)
        inside = _counted.__dict__.setdefault("ops", set())
        if rule.op in inside:  # a tensor subclass calls the op that it was called for
            return in_low(*args, **kwargs)
        kernel_fallback.count_not_in_fp8(rule.op, reason)
        inside.add(rule.op)
        try:
            return in_low(*args, **kwargs)
        finally:
            inside.discard(rule.op)

    return wrapper
