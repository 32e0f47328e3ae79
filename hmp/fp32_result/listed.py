"""The kind of list of matrix products whose result stays in float32, and its rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..core import lists
from ..core.lists import ListKind
from ..core.policy.entries import ListEntry
from ..core.rules.plug_ins import CastRule, OpUnderRule, calls_of, make_of
from .products import PRODUCTS, needs_casts
from .refusals import why_not


def _compute(op: str, low_dtype: torch.dtype, words: object, *args: Any, **kwargs: Any) -> Any:
    return PRODUCTS[op](*args, low_dtype=low_dtype, **kwargs)


def _why_not_of(ruled: OpUnderRule) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    return functools.partial(why_not, ruled.op, low_dtype=ruled.low_dtype)


def _by_casts(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, bool]:
    return {"by_casts": needs_casts(op, args, kwargs)}


FP32_RESULT_LIST = CastRule(
    "FP32_RESULT_LIST",
    number="R23",
    label="fp32_result",
    sentence="its inputs are rounded to the low-precision dtype, and its result stays float32 (R23)",
    make=make_of(_why_not_of, "its result not in float32", "fp32_result", _by_casts),
    holds=lambda case: case.op in PRODUCTS,
    calls=calls_of(_compute, computes=lambda ruled: ruled.low_dtype),
    is_list=True,
    dtype=lambda low_dtype: low_dtype,
    hides_dtypes=True,
)


def _refusal(entry: ListEntry, ops: tuple[str, ...]) -> str:
    if PRODUCTS.keys() >= set(ops):
        return ""
    return f"the fp32_result list expected a matrix product ({', '.join(PRODUCTS)}), got {entry.text!r}; remove it"


lists.add(
    ListKind(
        name="fp32_result",
        title="fp32_result",
        contents="matrix products of low-precision inputs whose result stays float32",
        module=__name__,
        rule=FP32_RESULT_LIST,
        over=("bf16", "promote"),
        excludes=("fp32", "fp8"),
        instead="bf16",
        is_low=True,
        refusal=_refusal,
    )
)
