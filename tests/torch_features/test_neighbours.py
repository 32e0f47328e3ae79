"""What else may be at work in the process: torch's defaults, other people's objects and patches, also those that were there before hmp.

What stands at torch's places takes exactly the calls that torch's own functions take. What it casts, P1 asks, and under whom, P4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _device

import hmp
from trap_kit import policy, same

LOW, WIDE, F64 = torch.bfloat16, torch.float32, torch.float64
PRODUCTS = policy(bf16=["linear", "matmul", "mm"], fp32=["softmax"])
A, B = torch.randn(4, 4), torch.randn(4, 4)


# --- torch's defaults


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(WIDE)
    torch.set_default_device(None)


@pytest.mark.parametrize("dtype", [F64, LOW, torch.float16])
def test_the_default_dtype_is_that_of_what_is_made_and_of_nothing_else(dtype: torch.dtype, defaults: None) -> None:
    torch.set_default_dtype(dtype)
    with hmp.convert(policy=PRODUCTS):
        layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
        assert layer.weight.dtype is x.dtype is dtype
        made, given = torch.mm(x, x.t()), torch.mm(A, B)
        soft = torch.softmax(x, 0)
        linear = layer(x)
    low = dtype if dtype is F64 else LOW  # float64 is left to torch
    same(made, torch.mm(x.to(low), x.t().to(low)))
    same(linear, F.linear(x.to(low), layer.weight.to(low), layer.bias.to(low)))
    same(soft, torch.softmax(x if dtype is F64 else x.float(), 0))
    same(given, torch.mm(A.to(LOW), B.to(LOW)))


@pytest.mark.parametrize("first", ["convert", "device"])
def test_a_default_device_is_followed_whether_it_or_the_casts_came_first(first: str, defaults: None) -> None:
    _device._device_constructors.cache_clear()  # torch fills it with what stands in its places when it is first used

    def made() -> dict[str, tuple[str, torch.dtype]]:
        constructors = {
            "ones": lambda: torch.ones(2),
            "full": lambda: torch.full((2,), 1.5),
            "Linear": lambda: torch.nn.Linear(2, 2).weight,
        }
        results = {name: construct() for name, construct in constructors.items()}
        return {name: (result.device.type, result.dtype) for name, result in results.items()}

    if first == "device":
        torch.set_default_device("meta")
    with hmp.convert():
        torch.set_default_device("meta")
        under = made()
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is LOW
    assert under == made()
    assert {device for device, _ in under.values()} == {"meta"}
    torch.set_default_device("cpu")
    with hmp.convert(policy=PRODUCTS):
        same(torch.mm(A, B), torch.mm(A.to(LOW), B.to(LOW)))
    torch.set_default_device(None)
    assert made()["full"] == ("cpu", WIDE)


# --- what somebody else puts in the place of torch's functions while hmp casts


LINEAR = torch.nn.Linear(4, 4)
ALONE = policy(bf16=["linear", "relu", "silu"])


def addmm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, input, weight.t())


def clamped(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return input.clamp(min=0)


def low_addmm() -> torch.Tensor:
    return torch.addmm(LINEAR.bias.to(LOW), A.to(LOW), LINEAR.weight.to(LOW).t())


@pytest.mark.native_kernels
@pytest.mark.filterwarnings("ignore:.* was patched by another library")
def test_a_function_that_replaces_an_op_while_hmp_casts_is_that_op_from_the_next_policy_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(LINEAR, torch.nn.ReLU())
    monkeypatch.setattr(F, "linear", F.linear)  # put back in the end
    hmp.convert(policy=ALONE)
    dispatcher = F.linear
    monkeypatch.setattr(F, "linear", addmm)
    monkeypatch.setattr(F, "relu", clamped)
    hmp.convert(policy=policy(bf16=["linear", "relu", "tanh"]))
    assert F.linear == addmm and F.relu == clamped  # they stay what they are
    same(model(A).detach(), low_addmm().relu().detach())
    with hmp.disable_casts():
        assert model(A).dtype is WIDE
    F.linear = dispatcher
    same(LINEAR(A).detach(), F.linear(A.to(LOW), LINEAR.weight.to(LOW), LINEAR.bias.to(LOW)).detach())
    F.linear = addmm
    hmp.revert()
    assert LINEAR(A).dtype is WIDE and addmm.__code__.co_filename == __file__


def passing_on(original):
    return lambda *args, **kwargs: original(*args, **kwargs)


def test_r5_the_inplace_flag_is_seen_through_a_foreign_wrapper(monkeypatch) -> None:
    monkeypatch.setattr(F, "relu", passing_on(F.relu))
    monkeypatch.setattr(F, "dropout", passing_on(F.dropout))
    with hmp.convert():
        x, y = torch.tensor([-1.0, 2.0]), torch.ones(100)
        F.relu(x, inplace=True)
        F.dropout(y, 0.5, True, True)
        assert F.relu(x).dtype is torch.bfloat16
    assert x.tolist() == [0.0, 2.0]
    assert 0 < (y == 0).sum() < 100


def test_r9_running_statistics_move_through_a_foreign_wrapper(monkeypatch) -> None:
    for name in ("batch_norm", "layer_norm", "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, passing_on(getattr(F, name)))
    with hmp.convert():
        norm = torch.nn.BatchNorm1d(3)
        assert norm(torch.randn(64, 3) + 5).dtype is torch.bfloat16
        assert torch.nn.LayerNorm(3)(torch.randn(2, 3)).dtype is torch.bfloat16
        q, k = torch.randn(1, 1, 2, 4).bfloat16(), torch.randn(1, 1, 2, 4)
        assert F.scaled_dot_product_attention(q, k, k).dtype is torch.bfloat16
    assert norm.running_mean.dtype is torch.float32
    assert (norm.running_mean > 0.3).all()


BF16, F32 = torch.bfloat16, torch.float32
x, y = torch.randn(3, 3), torch.randn(3, 3)

REFUSED = {
    "too many": lambda: torch.matmul(x, y, x),
    "too many for a method": lambda: x.matmul(y, x),
    "no such keyword": lambda: torch.matmul(x, y, nonsense=1),
    "nothing": lambda: torch.matmul(),
    "one missing": lambda: F.linear(x),
    "a list for a tensor": lambda: torch.matmul([1.0], y),
    "a number for a tensor": lambda: F.linear(1.0, y),
    "None for a tensor": lambda: torch.bmm(None, y[None]),
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
