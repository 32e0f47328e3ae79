"""Scope: a region casts in its thread or task, an applied model casts inside its calls, and each policy stays where it is."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
HALF_LINEAR = policy(bf16=["linear"], dtype=HALF, name="half")
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
    assert outer.seen == [LOW, LOW] and inner.seen == [HALF]
    for around in (hmp.casts("habana"), hmp.convert()):
        with around:
            assert inner(X).dtype == HALF and plain() == LOW
            with pytest.raises(KeyError):
                broken(X)
            assert plain() == LOW
            with hmp.disable_casts():
                assert inner(X).dtype == WIDE
                with hmp.enable_casts():
                    assert inner(X).dtype == HALF
    assert inner(X).dtype == HALF and plain() == WIDE


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
        assert hmp.apply(model)(X).dtype == model(X).dtype == LOW
        assert torch.nn.Linear(2, 2)(X).dtype == WIDE
    assert type(lazy) is torch.nn.Linear


def test_apply_refuses_what_it_cannot_reach_into_and_survives_a_recompiled_graph():
    class Static(torch.nn.Module):
        __call__ = staticmethod(lambda x: torch.nn.functional.linear(x, x))

    for model in (Static(), torch.jit.script(torch.nn.Linear(2, 2)), torch.relu):
        with pytest.raises(hmp.HmpError):
            hmp.apply(model)
    graph = hmp.apply(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert graph(X).dtype == LOW
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
