"""A list of somebody else's: `stochastic.txt` has ops that compute in float32 and whose results are rounded stochastically."""

from typing import Any

import torch

from hmp.core import lists
from hmp.core.rules.plug_ins import CastRule, Op, OpUnderRule, calls_of, one_dtype_wrapper, writes


def rounded(op: str, low_dtype: torch.dtype, words: object, result: Any) -> Any:
    """Return one of the two neighbours in the low dtype: each as often as the number is near to it. Its gradient is that of a cast."""
    if not isinstance(result, torch.Tensor) or result.dtype is not torch.float32:
        return result
    dropped = 1 << (16 if low_dtype is torch.bfloat16 else 13)  # the bits that the low dtype lacks
    bits = result.detach().view(torch.int32)
    up_or_down = ((bits + torch.randint_like(bits, dropped)) & -dropped).view(torch.float32)
    return (result + (up_or_down - result.detach())).to(low_dtype)  # exact: the two are neighbours


def make(op: Op, ruled: OpUnderRule, caster: Any, round_result: Op) -> Op:
    in_float32 = one_dtype_wrapper(op, ruled, caster)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = in_float32(*args, **kwargs)
        return result if writes(args, kwargs, ruled) else round_result(result)

    return wrapper


RULE = CastRule(
    "STOCHASTIC_LIST",
    label="stochastic",
    sentence="it computes in float32, and its result is rounded stochastically",
    make=make,
    calls=calls_of(rounded, computes=lambda ruled: torch.float32),
    is_list=True,
    dtype=lambda low_dtype: torch.float32,
)


def refusal(entry: Any, ops: tuple[str, ...]) -> str:
    return f"{entry.name!r} returns integers, which need no rounding; remove it" if {"argmax", "argmin"} & {*ops} else ""


KIND = lists.ListKind(
    name="stochastic",
    title="stochastic",
    contents="ops whose results are rounded stochastically",
    module=__name__,
    rule=RULE,
    over=("bf16", "promote"),
    excludes=("fp32",),
    refusal=refusal,
    columns={"rounded": lambda call: call.result.numel() if call.rule is RULE else 0},
)
lists.add(KIND)
