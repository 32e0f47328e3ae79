"""Regions inside compiled code act as in eager, and compiled code follows the state around each call: it is compiled once for each."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

import hmp
from autocast_kit import real_state
from compile_kit import BF16, BRIDGED, F16, F32, HALF, LOW, OTHER, Graphs, dtypes

pytestmark = pytest.mark.usefixtures("fresh_compiler")
X = torch.ones(3, 3)
F64 = torch.float64
REGION = hmp.casts(HALF)


@hmp.disable_casts
def off(x):
    return torch.mul(x, x)


@hmp.casts(HALF)
def half(x):
    return torch.mul(x, x)


@hmp.bf16_function
def own(x, y):
    return torch.softmax(x * y, -1)


def nested(x):
    with hmp.disable_casts():
        a = torch.mul(x, x)
        with hmp.enable_casts():
            b = x * x
            with hmp.disable_casts():
                c = x.mul(x)
        d = x * 2
    return a, b, c, d, 2 * x


def policies(x):
    with hmp.casts(HALF):
        a = x * x
        with hmp.disable_casts():
            b = x * x
    with REGION:
        c = x * x
    return a, b, c, x * x


def decorated(x):
    return off(x), half(x), own(x, x), x * x


def asking(x):
    return x * x if hmp.casts_enabled() else x.double()


def raising(x):
    try:
        with hmp.disable_casts():
            raise ValueError
    except ValueError:
        return x * x


def autocast_off(x):
    with torch.autocast("cpu", enabled=False):
        a = x * x
        with torch.autocast("cpu"):
            b = x * x
        with hmp.enable_casts():
            c = x * x
    return a, b, c, x * x


def asking_autocast(x):
    y = x * x
    if torch.is_autocast_enabled("cpu"):
        return y.to(torch.get_autocast_dtype("cpu"))
    return y.double()


def asking_autocast_in_a_region(x):
    with hmp.casts(HALF):
        inside = torch.mul(x, x), asking_autocast(x)
    return *inside, asking_autocast(x)


def regions(x):
    return *nested(x), *policies(x), *decorated(x), raising(x), *autocast_off(x)


# function → the dtypes of what it gives under LOW, and where casts are off
FUNCTIONS = {
    regions: (
        [F32, BF16, F32, F32, BF16, F16, F32, F16, BF16, F32, F16, BF16, BF16, BF16, F32, BF16, BF16, BF16],
        [F32, BF16, F32, F32, F32, F16, F32, F16, F32, F32, F16, F32, F32, F32, F32, F32, BF16, F32],
    ),
    asking: ([BF16], [F64]),
    asking_autocast_in_a_region: ([F16, F16, BF16], [F16, F16, F64]),
}


@pytest.mark.parametrize("function", [regions, asking, pytest.param(asking_autocast_in_a_region, marks=pytest.mark.slow)])
def test_regions_in_compiled_code(function):
    before = real_state()
    expected, expected_off = FUNCTIONS[function]
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with hmp.convert(policy=LOW):
        for _ in range(2):
            assert dtypes(compiled(X)) == dtypes(function(X)) == expected
            with hmp.disable_casts():
                assert dtypes(compiled(X)) == dtypes(function(X)) == expected_off
    assert real_state() == before


def test_regions_in_compiled_code_do_nothing_without_hmp():
    compiled = torch.compile(lambda x: (*nested(x), raising(x), asking(x), off(x), own(x, x)), backend="eager", fullgraph=True)
    assert dtypes(compiled(X)) == [F32] * 6 + [F64, F32, F32]


@pytest.mark.native_kernels
@BRIDGED
def test_regions_leave_nothing_in_the_graph():
    def products(x):
        with hmp.disable_casts():
            wide = x @ x
        return wide, x @ x

    hmp.convert(policy=LOW)
    graphs = Graphs()
    torch.compile(products, backend=graphs, fullgraph=True)(X)
    assert graphs.calls() == ["matmul", "bfloat16", "bfloat16", "matmul"]


@pytest.mark.slow
def test_graph_breaks_inside_and_outside_regions():
    def broken(x):
        with hmp.casts(HALF), hmp.disable_casts():
            a = x * x
            torch._dynamo.graph_break()
            with hmp.enable_casts():
                b = x * x
        torch._dynamo.graph_break()
        return a, b, x * x

    hmp.convert(policy=LOW)
    compiled = torch.compile(broken, backend="eager")
    for _ in range(2):
        assert dtypes(compiled(X)) == [F32, F16, BF16]
        with hmp.disable_casts():
            assert dtypes(compiled(X)) == [F32, F16, F32]


@pytest.mark.slow
@BRIDGED
def test_the_first_casts_of_a_process_breaks_the_graph_and_a_full_graph_says_why() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with hmp.casts("habana"):
            return torch.nn.functional.linear(x, x)

    x = torch.randn(3, 3)
    hmp.revert()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)exception.*hmp\.casts\(\) was first entered inside compiled code"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert [compiled(x).dtype, compiled(x).dtype] == [torch.bfloat16] * 2
    torch._dynamo.reset()  # it has given that function up
    # hmp is in place now
    assert torch.compile(model, backend="eager", fullgraph=True)(x).dtype is torch.bfloat16
    hmp.revert()


WEIGHT = torch.ones(3, 3)
MODEL = torch.nn.Linear(3, 3)


def makes_a_policy(x):
    with hmp.casts(hmp.Policy(bf16=("linear",))):
        return torch.nn.functional.linear(x, WEIGHT)


def applies(x):
    low = hmp.apply(MODEL, hmp.Policy("own", bf16={"linear"}))(x)
    hmp.remove(MODEL)
    return low, MODEL(x)


MAKING = {makes_a_policy: [BF16], applies: [BF16, F32]}


@pytest.mark.parametrize("function", MAKING)
def test_policies_are_made_in_compiled_code(function):
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        assert dtypes(compiled(X)) == dtypes(function(X)) == MAKING[function]


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
    compiled = torch.compile(lambda x: negated(x), backend=graphs, fullgraph=True)
    hmp.convert(policy=LOW)
    assert compiled(X).dtype is F32
    hmp.register(__import__(__name__), "negated", "bf16")
    assert compiled(X).dtype is BF16
    assert compiled(X).dtype is BF16
    assert len(graphs) == 2


def negated(x):
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
