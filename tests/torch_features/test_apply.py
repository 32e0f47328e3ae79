"""Scope: a region casts in its thread or task, an applied model casts inside its calls, and each policy stays where it is.

apply(methods=...): other methods of the model run under its policy too. apply(outputs=...): what a call of the model returns is cast, and
nothing that its layers hand on.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from trap_kit import policy

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LINEAR = policy(bf16=["linear"])
HALF_LINEAR = policy(bf16=["linear"], dtype=F16, name="half")
X = torch.ones(1, 2)


class Seen(torch.nn.Module):
    """A model that tells what each of its calls ran in."""

    def __init__(self, child: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.child = child
        self.seen: list[torch.dtype] = []

    def forward(self, x):
        y = self.linear(x)
        self.seen.append(y.dtype)
        if self.child is not None:
            self.child(x)
            self.seen.append(self.linear(x).dtype)
        return y


def plain() -> torch.dtype:
    """What a listed op gives here."""
    return F.linear(X, torch.eye(2)).dtype


def test_apply_the_innermost_policy_is_in_force_and_what_is_around_a_call_comes_back():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise KeyError

    inner, broken = hmp.apply(Seen(), HALF_LINEAR), hmp.apply(Broken())
    outer = hmp.apply(Seen(inner))
    outer(X)
    assert outer.seen == [BF16, BF16] and inner.seen == [F16]
    for around in (hmp.casts("habana"), hmp.convert()):
        with around:
            assert inner(X).dtype == F16 and plain() == BF16
            with pytest.raises(KeyError):
                broken(X)
            assert plain() == BF16
            with hmp.disable_casts():
                assert inner(X).dtype == F32
                with hmp.enable_casts():
                    assert inner(X).dtype == F16
    assert inner(X).dtype == F16 and plain() == F32


def test_apply_leaves_what_the_model_shows_of_itself():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    shown = repr(model), list(model.state_dict()), [name for name, _ in model.named_modules()], type(model)
    hmp.apply(model, hmp.Policy("mine", bf16=["linear"], fp32=["linear @ 1"]))
    assert (repr(model), list(model.state_dict()), [name for name, _ in model.named_modules()], type(model)) == shown


def test_apply_torch_modules_and_classes_with_a_call_of_their_own_and_lazy_ones():
    class Called(torch.nn.Linear):
        def __call__(self, x):
            return super().__call__(x + 0)

    lazy = torch.nn.LazyLinear(2)
    for model in (torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)), Called(2, 2), lazy):
        assert hmp.apply(model)(X).dtype == model(X).dtype == BF16
        assert torch.nn.Linear(2, 2)(X).dtype == F32
    assert type(lazy) is torch.nn.Linear


def test_apply_refuses_what_it_cannot_reach_into_and_survives_a_recompiled_graph():
    class Static(torch.nn.Module):
        __call__ = staticmethod(lambda x: torch.nn.functional.linear(x, x))

    for model in (Static(), torch.jit.script(torch.nn.Linear(2, 2)), torch.relu):
        with pytest.raises(hmp.HmpError):
            hmp.apply(model)
    graph = hmp.apply(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert graph(X).dtype == BF16
    graph.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hmp.revert()


def test_apply_hands_on_every_keyword_of_the_models_own() -> None:
    class Model(torch.nn.Module):
        def forward(self, x, *, state, function):
            return x + state, function

    x = torch.ones(2)
    result, function = hmp.apply(Model())(x, state=x, function="mine")
    assert result.tolist() == [2.0, 2.0] and function == "mine"


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)

    def steps(self, x: torch.Tensor):
        yield self.inside(x)

    @staticmethod
    def build() -> Coder:
        return Coder()


class Child(Coder):
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return super().decode(x) + 0


def by_hand(model: Coder, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x.to(BF16), model.inside.weight.to(BF16), model.inside.bias.to(BF16))


@pytest.mark.native_kernels
def test_the_methods_that_are_named_run_under_the_policy_and_no_others() -> None:
    told = [(str(inspect.signature(each)), each.__name__) for each in (Coder.encode, Coder.__call__)]
    model = hmp.apply(Coder(), LINEAR, methods=("forward", "encode"))
    assert [(str(inspect.signature(each)), each.__name__) for each in (type(model).encode, type(model).__call__)] == told
    assert torch.equal(model.encode(X), by_hand(model, X)) and model.encode(X).dtype is BF16
    assert model.decode(X).dtype is F32
    assert model(X).dtype is BF16
    assert model.inside(X).dtype is F32  # a call of its own
    other = Coder()
    assert other.encode(X).dtype is F32
    with hmp.disable_casts():
        assert model.encode(X).dtype is F32


@pytest.mark.usefixtures("unpatched")
def test_remove_and_revert_undo_it() -> None:
    own = Coder.__dict__["encode"]
    model = hmp.apply(Coder(), LINEAR, methods=("encode", "decode"))
    hmp.remove(model)
    assert model.encode(X).dtype is F32
    hmp.apply(model, LINEAR)
    assert model.encode(X).dtype is F32
    hmp.revert()
    assert Coder.__dict__["encode"] is own


@pytest.mark.usefixtures("fresh_compiler")
def test_of_a_subclass_of_a_copy_and_of_compiled_code() -> None:
    child = hmp.apply(Child(), LINEAR, methods=("encode", "decode"))
    assert child.encode(X).dtype is child.decode(X).dtype is BF16
    assert copy.deepcopy(child).encode(X).dtype is BF16
    assert "encode" not in vars(Child) or Coder().encode(X).dtype is F32
    compiled = torch.compile(lambda x: child.encode(x), backend="eager", fullgraph=True)
    assert compiled(X).dtype is BF16
    wrapped = hmp.apply(torch.compile(Coder(), backend="eager"), LINEAR, methods=("encode",))
    assert wrapped.encode(X).dtype is BF16


def test_what_a_method_returns_is_cast_to_the_dtype_of_outputs() -> None:
    model = hmp.apply(Coder(), LINEAR, outputs="float32", methods=("encode",))
    assert model.encode(X).dtype is F32 and model(X).dtype is F32
    assert not torch.equal(model.encode(X / 3), nn.functional.linear(X / 3, model.inside.weight, model.inside.bias))


@pytest.mark.parametrize("methods", ["encode", ("encod",), ("steps",), ("build",)])
def test_what_cannot_be_is_refused_and_nothing_is_applied(methods: object) -> None:
    model = Coder()
    with pytest.raises(hmp.HmpError, match=methods if isinstance(methods, str) else methods[0]):
        hmp.apply(model, LINEAR, methods=methods)  # type: ignore[arg-type]
    for wrong in (torch.int32, 3, "float8_e4m3fn"):
        with pytest.raises(hmp.HmpError, match="outputs="):
            hmp.apply(model, LINEAR, outputs=wrong)
    assert model(X).dtype is F32


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


@pytest.mark.parametrize(("outputs", "dtype"), [(torch.float32, F32), ("torch.float16", F16), (None, BF16)])
def test_floating_outputs_in_every_container_have_the_dtype(outputs: Any, dtype: torch.dtype) -> None:
    model, x = Many(), torch.randn(2, 4)
    expected = torch.nn.functional.linear(x.to(BF16), model.layer.weight.to(BF16), model.layer.bias.to(BF16)).to(dtype)
    out = hmp.apply(model, LINEAR, outputs=outputs)(x)
    nested, pair, found = out["nested"], out["pair"], out["found"]
    lows = (out["one"], nested[0], nested[1][0], nested[1][1]["deep"], pair.low, found.low, found.more[0].low)
    assert {each.dtype for each in (*lows, out["ordered"]["a"], out["user"]["a"])} == {dtype} and torch.equal(out["one"], expected)
    assert model.seen == [BF16]  # what the layer hands on
    assert (out["ids"].dtype, out["wide"].dtype, out["complex"].dtype, out["none"]) == (torch.int64, F64, torch.complex64, None)
    assert (type(pair), type(found), type(out["ordered"]), type(out["user"])) == (Pair, Found, OrderedDict, UserDict)
    assert found.name == "found" and pair.count == 7


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
