"""Compiled code follows the state around each call, and is compiled once for each state that there was."""

from __future__ import annotations

import pytest
import torch

import hmp
from compile_kit import BF16, BRIDGED, F16, F32, HALF, LOW, OTHER, Graphs, dtypes

pytestmark = pytest.mark.usefixtures("fresh_compiler")
X = torch.ones(3, 3)
ON, OFF, OTHERS, HALVES = [BF16, F32, BF16], [F32, F32, F32], [F32, BF16, F32], [F16, F32, F32]


def ops(x):
    return x.mul(x), torch.softmax(x, -1), torch.nn.functional.relu(x)


@BRIDGED
def test_compiled_code_follows_the_state_and_no_state_is_compiled_twice():
    graphs = Graphs()
    compiled = torch.compile(ops, backend=graphs, fullgraph=True)
    assert dtypes(compiled(X)) == OFF
    graphs.all.clear()
    hmp.convert(policy=LOW)
    for _ in range(2):
        assert dtypes(compiled(X)) == ON
        with hmp.casts(LOW.replace()):  # the same contents are the same state
            assert dtypes(compiled(X)) == ON
        with hmp.disable_casts():
            assert dtypes(compiled(X)) == OFF
            with hmp.enable_casts():
                assert dtypes(compiled(X)) == ON
        hmp.convert(policy=OTHER)
        assert dtypes(compiled(X)) == OTHERS
        with hmp.casts(HALF):
            assert dtypes(compiled(X)) == HALVES
        with hmp.disable_casts(), hmp.enable_casts():  # code that was compiled without casts follows the policy that comes back
            assert dtypes(compiled(X)) == OTHERS
        with hmp.convert(policy=LOW):
            assert dtypes(compiled(X)) == ON
        assert dtypes(compiled(X)) == OTHERS
        hmp.convert(policy=LOW)
    assert len(graphs) == 4
    hmp.revert()
    assert dtypes(compiled(X)) == OFF


@BRIDGED
def test_compiled_code_that_backward_calls_has_no_lists_and_mixtures_that_torch_refuses_are_cast():
    weight = torch.randn(3, 3)

    @torch.compile(backend="eager", fullgraph=True)
    def in_backward(gradient):
        return torch.mm(gradient.bfloat16(), weight), torch.mm(gradient, weight)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            mixed, wide = in_backward(gradient)
            found.extend(dtypes((mixed, wide)))
            return mixed + wide

    found: list[torch.dtype] = []
    x = torch.randn(3, 3, requires_grad=True)
    wanted = torch.mm(torch.ones(3, 3).bfloat16(), weight.bfloat16()) + torch.mm(torch.ones(3, 3), weight)
    hmp.convert(policy=hmp.Policy("of a test", bf16={"mm"}))
    Doubled.apply(x).sum().backward()
    hmp.revert()
    assert found[1] is F32, "mm is on a list, which user Python in backward has none of"
    assert x.grad is not None and x.grad.dtype is F32
    torch.testing.assert_close(x.grad, wanted, rtol=0.01, atol=0.01)


@BRIDGED
def test_functions_registered_later_are_cast_in_code_compiled_before():
    graphs = Graphs()
    compiled = torch.compile(lambda x: own(x), backend=graphs, fullgraph=True)
    hmp.convert(policy=LOW)
    assert compiled(X).dtype is F32
    hmp.register(__import__(__name__), "own", "bf16")
    assert compiled(X).dtype is BF16
    assert compiled(X).dtype is BF16
    assert len(graphs) == 2


def own(x):
    return x.neg()


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x)


@pytest.mark.slow
def test_a_module_that_was_compiled_in_place_before_follows_its_policy_and_its_lines():
    """`module.compile()` keeps what calls it had before apply() was called. The classes are this test's own: none is patched before."""

    class Inner(torch.nn.Linear):
        pass

    model, other = Outer(), Outer()
    for each in (model, other):
        each.head = Inner(3, 3)
    model.compile(backend="eager")
    other.head.compile(backend="eager")
    assert model(X).dtype is other(X).dtype is F32
    products = hmp.Policy(bf16={"linear"})
    for _ in range(2):
        hmp.apply(model, products)
        assert model(X).dtype is BF16
        assert torch.equal(model(X), torch.nn.functional.linear(X.to(BF16), model.head.weight.to(BF16), model.head.bias.to(BF16)))
        hmp.remove(model)
        assert model(X).dtype is F32
    lines = hmp.Policy(bf16={"linear"}, fp32={"linear @ head"})
    with hmp.casts(lines, model=other):
        assert other(X.to(BF16)).dtype is F32
    with hmp.convert(policy=lines, model=other):
        assert other(X.to(BF16)).dtype is F32
    hmp.apply(other, products)
    assert other(X).dtype is BF16
    hmp.revert()
    assert other(X).dtype is F32
    assert "__call__" not in vars(Inner)
