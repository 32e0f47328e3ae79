"""apply(model, outputs=...): what a call of the model returns is cast, and nothing that its layers hand on."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch

import hmp

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LINEAR = hmp.Policy("linear", bf16={"linear"})


class Pair(NamedTuple):
    low: torch.Tensor
    count: int


@dataclasses.dataclass(frozen=True)
class Found:
    low: torch.Tensor
    more: Any
    name: str = "found"


class Many(torch.nn.Module):
    """Returns its layer's result in every container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> Any:
        low = self.layer(x)
        self.seen.append(low.dtype)
        ids = torch.arange(3)
        return {
            "one": low,
            "nested": [low, (low, {"deep": low})],
            "pair": Pair(low, 7),
            "found": Found(low, [Pair(low, 1)]),
            "ordered": OrderedDict(a=low),
            "user": UserDict(a=low),
            "ids": ids,
            "wide": low.double(),
            "complex": torch.complex(x, x),
            "none": None,
        }


def dtypes(out: Any) -> set[torch.dtype]:
    places = (
        out["one"],
        out["nested"][0],
        out["nested"][1][0],
        out["nested"][1][1]["deep"],
        out["pair"].low,
        out["found"].low,
        out["found"].more[0].low,
        out["ordered"]["a"],
        out["user"]["a"],
    )
    return {place.dtype for place in places}


@pytest.mark.parametrize(("outputs", "dtype"), [(torch.float32, F32), ("torch.float16", F16), (None, BF16)])
def test_floating_outputs_in_every_container_have_the_dtype(outputs: Any, dtype: torch.dtype) -> None:
    model, x = Many(), torch.randn(2, 4)
    expected = torch.nn.functional.linear(x.to(BF16), model.layer.weight.to(BF16), model.layer.bias.to(BF16)).to(dtype)
    out = hmp.apply(model, LINEAR, outputs=outputs)(x)
    assert dtypes(out) == {dtype} and torch.equal(out["one"], expected)
    assert model.seen == [BF16]  # what the layer hands on
    assert (out["ids"].dtype, out["wide"].dtype, out["complex"].dtype, out["none"]) == (torch.int64, F64, torch.complex64, None)
    assert (type(out["pair"]), type(out["found"]), type(out["ordered"]), type(out["user"])) == (Pair, Found, OrderedDict, UserDict)
    assert out["found"].name == "found" and out["pair"].count == 7


def test_gradients_pass_and_what_needs_no_cast_is_returned_itself() -> None:
    model = torch.nn.Linear(4, 4)
    out = hmp.apply(model, LINEAR, outputs="float32")(torch.randn(2, 4))
    out.sum().backward()
    assert out.dtype is F32 and model.weight.grad is not None and model.weight.grad.dtype is F32

    class Same(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    given = {"x": torch.ones(2), "y": [torch.ones(1)]}
    assert hmp.apply(Same(), LINEAR, outputs="float32")(given) is given
    low = torch.ones(2, dtype=BF16)  # the model may hold what it returns
    for held, get in (([low], lambda x: x[0]), (UserDict(a=low), lambda x: x["a"]), (Found(low, 1), lambda x: x.low)):
        out = hmp.apply(Same(), LINEAR, outputs="float32")(held)
        assert type(out) is type(held) and get(out).dtype is F32 and get(held) is low


class Twice(torch.nn.Module):
    """Returns its layer's result, a view of it and its input several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        low = self.layer(x)
        view = low.view(-1)
        return low, [low, view, x], {"again": low, "view": view, "found": Found(low, x)}, UserDict(a=low)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_tensor_that_is_returned_twice_is_one_tensor(is_compiled: bool, fresh_compiler: None) -> None:
    model, x = hmp.apply(Twice(), LINEAR, outputs="float32"), torch.randn(2, 4)
    low, (same, view, given), named, user = (torch.compile(model, backend="eager") if is_compiled else model)(x)
    assert all(each is low for each in (same, named["again"], named["found"].low, user["a"])) and named["view"] is view
    assert given is x and named["found"].more is x and low.dtype is view.dtype is F32
    (low.sum() + same.sum()).backward()
    assert torch.equal(model.layer.bias.grad, torch.full((4,), 4.0))


def test_it_lasts_as_long_as_the_policy_does() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    hmp.apply(model, LINEAR, outputs="float32")
    assert copy.deepcopy(model)(x).dtype is F32
    with hmp.disable_casts():
        assert torch.equal(model(x), torch.nn.functional.linear(x, model.weight, model.bias))
    hmp.apply(model, LINEAR)  # again, without
    assert model(x).dtype is BF16
    assert hmp.apply(model, hmp.Policy("half", dtype=F16, bf16={"linear"}), outputs=F32)(x).dtype is F32
    hmp.remove(model)
    low = torch.nn.Linear(4, 4).to(BF16)
    assert model(x).dtype is F32 and hmp.remove(low)(x.to(BF16)).dtype is BF16
    hmp.apply(low, LINEAR, outputs="float32")
    assert low(x).dtype is F32
    hmp.revert()
    assert low(x.to(BF16)).dtype is BF16


@pytest.mark.parametrize("wrong", [torch.int32, 3, "float8_e4m3fn"])
def test_what_is_no_dtype_of_outputs_is_an_error(wrong: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(hmp.HmpError, match="outputs="):
        hmp.apply(model, outputs=wrong)
    assert model(torch.ones(1, 2)).dtype is F32
