"""The kind of list of matrix products that run in FP8, and its rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..core import lists
from ..core.lists import ListKind, SearchLevel, WordFile
from ..core.policy.entries import ListEntry
from ..core.policy.policy import Policy
from ..core.rules.plug_ins import CastRule, Op, OpUnderRule, calls_of, make_of
from .kernels import is_real
from .products import PRODUCTS
from .quantization import E4M3, RECIPES
from .refusals import why_not


def _compute(op: str, low_dtype: torch.dtype, words: tuple[tuple[str, str], ...], *args: Any, **kwargs: Any) -> Any:
    said = dict(words)
    return PRODUCTS[op](*args, recipe=RECIPES[said["fp8_recipe"]], low_dtype=low_dtype, kernel=said["fp8_kernel"], **kwargs)


def _why_not_of(ruled: OpUnderRule) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    return functools.partial(why_not, ruled.op, recipe=RECIPES[ruled.word("fp8_recipe")], low_dtype=ruled.low_dtype)


FP8_LIST = CastRule(
    "FP8_LIST",
    number="R20",
    label="fp8",
    sentence="it runs in FP8 if its shapes and the device allow it, else in the low-precision dtype (R20)",
    make=make_of(_why_not_of, "not in FP8", "FP8"),
    holds=lambda case: case.op in PRODUCTS,  # not every alias of a product is one
    calls=calls_of(_compute, computes=lambda ruled: E4M3, notes="fp8"),  # both inputs, under every recipe
    is_list=True,
    dtype=lambda low_dtype: low_dtype,
    hides_dtypes=True,  # where FP8 is emulated its rounded values are float32 numbers
)


def _refusal(entry: ListEntry, ops: tuple[str, ...]) -> str:
    if PRODUCTS.keys() >= set(ops):
        return ""
    in_place = all(op.removesuffix("_") in PRODUCTS for op in ops)
    what = ", which writes into its input and keeps its dtype" if in_place else ""
    return f"the FP8 list expected a matrix product ({', '.join(PRODUCTS)}), got {entry.text!r}{what}; remove it"


def _described(policy: Policy) -> str:
    return f"FP8 recipe {policy.fp8_recipe}" + (", emulated on every device" if policy.fp8_kernel == "emulate" else "")


def _gain(function: Op, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy) -> tuple[float, float]:
    """Return the floating-point operations of a call that run in FP8, and all of them."""
    from torch.utils.flop_counter import FlopCounterMode  # here, since it brings much that only tune() needs

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    flops = counter.get_total_flops()
    return 0 if why_not(op, args, kwargs, RECIPES[policy.fp8_recipe], policy.dtype) else flops, flops


def _shows(objective: str, policy: Policy, device: torch.device) -> bool:
    return objective == "time" and is_real(policy.fp8_kernel, device, RECIPES[policy.fp8_recipe])


def _report() -> Any:
    from .report import FP8_PART  # the pages' modules, which only a report needs

    return FP8_PART


lists.add(
    ListKind(
        name="fp8",
        title="FP8",
        contents="matrix products that run in FP8, emulated on devices without FP8",
        module=__name__,
        rule=FP8_LIST,
        over=("bf16", "promote"),
        excludes=("fp32",),
        instead="bf16",
        is_low=True,
        computes_in=(E4M3,),
        words=(
            WordFile("fp8_recipe", "recipe.txt", tuple(RECIPES), "(FP8 recipe)"),
            WordFile("fp8_kernel", "kernel.txt", ("auto", "emulate"), "(FP8 kernel)"),
        ),
        aliases=("float8",),
        refusal=_refusal,
        described=_described,
        report=_report,
        level=SearchLevel(gains="matrix multiplication FLOPs", ops=frozenset(PRODUCTS), gain=_gain, shows=_shows),
    )
)
