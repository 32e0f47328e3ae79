"""What stands at torch's places takes exactly the calls that torch's own functions take. What it casts, P1 asks, and under whom, P4."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

BF16, F32 = torch.bfloat16, torch.float32
x, y = torch.randn(3, 3), torch.randn(3, 3)
y3 = y[None]

REFUSED = {
    "too many": lambda: torch.matmul(x, y, x),
    "too many for a method": lambda: x.matmul(y, x),
    "no such keyword": lambda: torch.matmul(x, y, nonsense=1),
    "nothing": lambda: torch.matmul(),
    "one missing": lambda: F.linear(x),
    "a list for a tensor": lambda: torch.matmul([1.0], y),
    "a number for a tensor": lambda: F.linear(1.0, y),
    "None for a tensor": lambda: torch.bmm(None, y3),
    "wrong shapes": lambda: torch.mm(x, torch.ones(2, 2)),
    "no dim": lambda: x.softmax(),
    "keepdim alone": lambda: torch.mean(x, keepdim=True),
    "a bad mode": lambda: torch.div(x, y, rounding_mode="up"),
}


@pytest.mark.parametrize("lists", [{"fp32": {"*"}}, {"bf16": {"*"}}, {"bf16": {"erfinv"}}], ids=["nothing to cast", "listed", "unlisted"])
def test_patched_ops_refuse_what_torch_refuses(lists: dict[str, set[str]]) -> None:
    for around in (contextlib.nullcontext(), hmp.casts(policy(**lists)), hmp.convert(policy=policy(**lists))):
        for off in (contextlib.nullcontext(), hmp.disable_casts()):
            with around, off:
                for call in REFUSED.values():
                    with pytest.raises((TypeError, RuntimeError)):
                        call()


class Wrapper(torch.Tensor):
    """A tensor that runs Python of its own for every op, and notes what it computes in."""

    notes: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        scaled = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))  # user code would see a cast here
        cls.notes.append(scaled.dtype)
        return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize("when", ["before", "after"])
def test_r8_what_a_tensor_subclass_does_inside_is_not_cast(when: str) -> None:
    cls = Wrapper
    with hmp.convert(policy=policy(bf16=["linear", "matmul"])):
        if when == "after":
            cls = type("Later", (Wrapper,), {"__torch_dispatch__": classmethod(Wrapper.__torch_dispatch__.__func__), "notes": []})
        cls.notes = []
        torch.matmul(cls(x.to(BF16)), cls(y.to(BF16)))  # nothing to cast
        torch.matmul(cls(x), cls(y))
        torch.erf(cls(x))  # unlisted
        assert F.linear(x, y).dtype is BF16
    assert cls.notes
    assert set(cls.notes) == {F32}
