"""What else may be at work in the process: torch's defaults, other people's objects and patches, torch's tables, its profiler."""

from __future__ import annotations

from collections.abc import Iterator

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


# --- torch's tables and its profiler
