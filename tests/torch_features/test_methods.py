"""apply(methods=...): other methods of the model run under its policy too."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import hmp
from trap_kit import policy

LOW, F32 = torch.bfloat16, torch.float32
LISTS = policy(bf16=["linear"])
X = torch.ones(2, 4)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)

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
    return nn.functional.linear(x.to(LOW), model.inside.weight.to(LOW), model.inside.bias.to(LOW))


@pytest.mark.native_kernels
def test_the_methods_that_are_named_run_under_the_policy_and_no_others() -> None:
    told = [(str(inspect.signature(each)), each.__name__) for each in (Coder.encode, Coder.__call__)]
    model = hmp.apply(Coder(), LISTS, methods=("forward", "encode"))
    assert [(str(inspect.signature(each)), each.__name__) for each in (type(model).encode, type(model).__call__)] == told
    assert torch.equal(model.encode(X), by_hand(model, X)) and model.encode(X).dtype is LOW
    assert model.decode(X).dtype is F32
    assert model(X).dtype is LOW
    assert model.inside(X).dtype is F32  # a call of its own
    other = Coder()
    assert other.encode(X).dtype is F32
    with hmp.disable_casts():
        assert model.encode(X).dtype is F32


@pytest.mark.usefixtures("unpatched")
def test_remove_and_revert_undo_it() -> None:
    own = Coder.__dict__["encode"]
    model = hmp.apply(Coder(), LISTS, methods=("encode", "decode"))
    hmp.remove(model)
    assert model.encode(X).dtype is F32
    hmp.apply(model, LISTS)
    assert model.encode(X).dtype is F32
    hmp.revert()
    assert Coder.__dict__["encode"] is own


@pytest.mark.usefixtures("fresh_compiler")
def test_of_a_subclass_of_a_copy_and_of_compiled_code() -> None:
    child = hmp.apply(Child(), LISTS, methods=("encode", "decode"))
    assert child.encode(X).dtype is child.decode(X).dtype is LOW
    assert copy.deepcopy(child).encode(X).dtype is LOW
    assert "encode" not in vars(Child) or Coder().encode(X).dtype is F32
    compiled = torch.compile(lambda x: child.encode(x), backend="eager", fullgraph=True)
    assert compiled(X).dtype is LOW
    wrapped = hmp.apply(torch.compile(Coder(), backend="eager"), LISTS, methods=("encode",))
    assert wrapped.encode(X).dtype is LOW


def test_what_a_method_returns_is_cast_to_the_dtype_of_outputs() -> None:
    model = hmp.apply(Coder(), LISTS, outputs="float32", methods=("encode",))
    assert model.encode(X).dtype is F32 and model(X).dtype is F32
    assert not torch.equal(model.encode(X / 3), nn.functional.linear(X / 3, model.inside.weight, model.inside.bias))


@pytest.mark.parametrize("methods", ["encode", ("encod",), ("steps",), ("build",)])
def test_what_cannot_be_is_refused_and_nothing_is_applied(methods: object) -> None:
    model = Coder()
    with pytest.raises(hmp.HmpError, match=methods if isinstance(methods, str) else methods[0]):
        hmp.apply(model, LISTS, methods=methods)  # type: ignore[arg-type]
    assert model(X).dtype is F32
