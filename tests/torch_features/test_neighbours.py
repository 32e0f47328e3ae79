"""What else may be at work in the process: torch's defaults, other people's objects and patches, torch's tables, its profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _device

import hmp
from low_kernels_kit import computes_in_float32, products_as_computed
from trap_kit import policy, same

LOW, WIDE, F64 = torch.bfloat16, torch.float32, torch.float64
PRODUCTS = policy(bf16=["linear", "matmul", "mm"], fp32=["softmax"])
A, B = torch.randn(4, 4), torch.randn(4, 4)


def explicit(net: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """What Linear, ReLU, Linear, Softmax give when their products are computed in bfloat16, by plain torch."""
    first, second = net[0], net[2]
    h = torch.relu(F.linear(x.to(LOW), first.weight.to(LOW), first.bias.to(LOW)))
    return torch.softmax(F.linear(h, second.weight.to(LOW), second.bias.to(LOW)).float(), -1)


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), torch.nn.Softmax(-1))


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


def test_an_op_that_others_put_back_in_its_place_is_cast_from_the_next_policy_on(unpatched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = (torch.mm,)  # a tuple is not followed
    monkeypatch.setattr(torch, "mm", torch.mm)  # put back in the end
    hmp.convert(policy=policy(bf16=["mm"]))
    torch.mm = own[0]
    assert torch.mm(A, B).dtype is WIDE
    hmp.convert(policy=policy(bf16=["mm", "bmm"]))
    assert torch.mm(A, B).dtype is LOW
    hmp.revert()
    assert torch.mm is own[0]


@pytest.mark.native_kernels
@pytest.mark.filterwarnings("ignore:.* was patched by another library")
@pytest.mark.parametrize("enter", ["convert", "apply", "another policy"])
def test_a_function_that_replaces_an_op_while_hmp_casts_is_that_op_from_the_next_policy_on(
    monkeypatch: pytest.MonkeyPatch, enter: str
) -> None:
    model = torch.nn.Sequential(LINEAR, torch.nn.ReLU())
    monkeypatch.setattr(F, "linear", F.linear)  # put back in the end
    hmp.convert(policy=ALONE)
    dispatcher = F.linear
    monkeypatch.setattr(F, "linear", addmm)
    monkeypatch.setattr(F, "relu", clamped)
    if enter == "convert":
        hmp.convert(policy=ALONE)
    elif enter == "apply":
        hmp.apply(model, ALONE)
    else:
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


def _profiled(run: Callable[[], Any], **options: Any) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler, record_function("mine"):
        run()
    events = Counter({event.key: event.count for event in profiler.key_averages()})
    assert events["mine"] == 1
    return Counter({key: count for key, count in events.items() if key.startswith("aten::")})


def test_the_profiler_counts_what_explicit_casts_call() -> None:
    model, x = net(), torch.randn(3, 4)
    with products_as_computed():
        written_out = _profiled(lambda: explicit(model, x))
    with hmp.convert(policy=PRODUCTS):
        found = _profiled(lambda: model(x))
        with_stack = _profiled(lambda: model(x), with_stack=True, record_shapes=True, profile_memory=True)
    plain = _profiled(lambda: model(x))
    ops = ("aten::linear", "aten::addmm", "aten::relu", "aten::softmax", "aten::_softmax", "aten::_to_copy")
    assert [found[op] for op in ops] == [with_stack[op] for op in ops] == [written_out[op] for op in ops]
    each = 7 if computes_in_float32(torch.bfloat16) else 3  # input, weight and bias, widened then, and the result
    assert found["aten::_to_copy"] == 2 * each and plain["aten::_to_copy"] == 0
