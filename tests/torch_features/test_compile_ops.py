"""torch.compile(fullgraph=True): functions, methods, operators, in-place ops and composites have the dtypes and values of explicit casts.

The oracle is plain torch with the casts written out, run before hmp does anything.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import hmp
from compile_kit import BF16, EACH_BACKEND, F32, LOW, NOT_IN_2_11
from strategies import Outputs
from trap_kit import policy, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")
X, Y = torch.linspace(-2, 2, 16).reshape(4, 4), torch.linspace(1, 3, 16).reshape(4, 4)
LISTS = policy(
    bf16="abs mul matmul linear relu mm baddbmm layer_norm conv1d batch_norm dropout leaky_relu hardswish hstack".split(),
    fp32=["softmax", "truediv", "exp", "cross_entropy", "embedding"],
    promote=["cat", "stack", "sub", "addcmul"],
    name="lists",
)


def low(t: torch.Tensor) -> torch.Tensor:
    return t.to(BF16)


def wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(F32)


# What P8's programs have not. Name → (what is compiled, the same with the casts written out)
CASES = {
    "function that cannot be overridden": (lambda x, y: F.hardswish(x), lambda x, y: F.hardswish(low(x))),
    "reflected composite": (lambda x, y: 1 / y.bfloat16(), lambda x, y: 1 / wide(low(y))),
    "Python's abs": (lambda x, y: abs(x), lambda x, y: low(x).abs()),  # Dynamo asks no mode about this and the next
    "explicit dtype": (lambda x, y: torch.softmax(x, -1, dtype=torch.float64), lambda x, y: torch.softmax(x, -1, dtype=torch.float64)),
    "named tuple": (lambda x, y: torch.stack(Pair(low(x), y)), lambda x, y: torch.stack((wide(low(x)), y))),
    "torch's named tuple": (lambda x, y: torch.hstack(torch.aminmax(x, dim=0)), lambda x, y: low(torch.hstack((x.amin(0), x.amax(0))))),
    "augmented": (lambda x, y: operator.imul(low(x), y), lambda x, y: low(x).mul_(y)),
    "in-place flag": (lambda x, y: F.relu(x.clone(), inplace=True), lambda x, y: F.relu(x)),
    "set item": (lambda x, y: _set_item(low(x), y), lambda x, y: _set_item(low(x), low(y))),
    "out=": (lambda x, y: torch.mm(x, y, out=torch.empty(4, 4)), lambda x, y: wide(torch.mm(low(x), low(y)))),
    "overflowing scalar": (lambda x, y: low(x) * 3.4e38 * 2, lambda x, y: _saturated(low(x), 3.4e38)),
    "norm": (lambda x, y: F.layer_norm(x, (4,), y[0], y[1]), lambda x, y: F.layer_norm(low(x), (4,), y[0], y[1])),
    "attention": (
        lambda x, y: F.scaled_dot_product_attention(low(x)[None], y[None], y[None]),
        lambda x, y: F.scaled_dot_product_attention(low(x)[None], low(y)[None], low(y)[None]),
    ),
    "a function whose ops are decided one by one": (lambda x, y: _attended(x, y), lambda x, y: _attended(low(x), low(y))),
    "einsum of mixed inputs": (lambda x, y: torch.einsum("ij,kj->ik", low(x), y), lambda x, y: torch.einsum("ij,kj->ik", low(x), low(y))),
    "a loss that forward makes": (  # Dynamo itself makes the call of F.cross_entropy there
        lambda x, y: torch.nn.CrossEntropyLoss(y[0], reduction="none")(torch.mm(x, x), torch.tensor([0, 1, 2, 3])),
        lambda x, y: F.cross_entropy(wide(torch.mm(low(x), low(x))), torch.tensor([0, 1, 2, 3]), y[0], reduction="none"),
    ),
    "composite in the graph": (
        lambda x, y: F.cross_entropy(low(x), torch.tensor([0, 1, 2, 3])),
        lambda x, y: F.cross_entropy(wide(low(x)), torch.tensor([0, 1, 2, 3])),
    ),
}
if NOT_IN_2_11:  # whose fake tensors take a mixture of dtypes that its kernel then refuses
    del CASES["einsum of mixed inputs"]


class Pair(NamedTuple):
    """Two tensors that an op takes together."""

    one: torch.Tensor
    other: torch.Tensor


def _set_item(into: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    into[0] = value[1]
    return into


def _attended(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.multi_head_attention_forward(*[x[:, None]] * 3, 4, 1, w.repeat(3, 1), *[None] * 3, False, 0, w, None, need_weights=False)[0]


def _saturated(x: torch.Tensor, scalar: float) -> torch.Tensor:
    limit = torch.finfo(BF16).max
    for factor in (scalar, 2.0):
        product = wide(x) * factor
        x = low(product.clamp(-limit, limit)) if factor > limit else low(x) * factor
    return x


@EACH_BACKEND
def test_compiled_ops_have_the_casts_of_the_lists(backend):
    functions = [function for function, _ in CASES.values()]

    def every_case(x, y):
        return [function(x.clone(), y.clone()) for function in functions]

    expected = [by_hand(X.clone(), Y.clone()) for _, by_hand in CASES.values()]
    hmp.convert(policy=LISTS)
    results = torch.compile(every_case, backend=backend, fullgraph=True)(X, Y)
    for name, found, wanted in zip(CASES, results, expected, strict=True):
        assert found.dtype is wanted.dtype, name
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def product_forward(ctx, x, y):
    ctx.save_for_backward(x, y)
    return x @ y


def product_backward(ctx, grad):
    x, y = ctx.saved_tensors
    return grad @ y.t(), x.t() @ grad


class Widened(torch.autograd.Function):
    forward = staticmethod(torch.amp.custom_fwd(product_forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(torch.amp.custom_bwd(product_backward, device_type="cpu"))


class Product(torch.autograd.Function):
    forward = staticmethod(torch.amp.custom_fwd(product_forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(product_backward, device_type="cpu"))


def test_compiled_islands_of_custom_fwd_are_float32_and_custom_bwd_runs_under_the_casts_of_its_forward():
    x, y, z = low(X).requires_grad_(), Y.clone().requires_grad_(), X.clone().requires_grad_()
    with hmp.casts(LISTS):
        wider = torch.compile(lambda: Widened.apply(x, y), backend="eager")()
        product = torch.compile(lambda: Product.apply(z, y), backend="eager", fullgraph=True)()
    same([wider, product], [wide(low(X)) @ Y, low(X) @ low(Y)])
    wider.sum().backward()
    same([y.grad], [wide(low(X)).t() @ torch.ones(4, 4)])
    y.grad, ones = None, low(torch.ones(4, 4))
    product.sum().backward()
    same([z.grad, y.grad], [wide(ones @ low(Y).t()), wide(low(X).t() @ ones)])
    with hmp.casts(policy(bf16=["exp"])):
        product = torch.compile(lambda: Product.apply(z, y), backend="eager", fullgraph=True)()
    same(list(torch.autograd.grad(product.sum(), (z, y))), [torch.ones(4, 4) @ Y.t(), X.t() @ torch.ones(4, 4)])


def test_compiled_a_function_of_the_users_may_not_write_into_what_was_cast_for_it():
    @hmp.bf16_function
    def append(history, x):
        history[-1:].copy_(x.sum())
        return x * 2

    hmp.convert(policy=policy(fp32=["tanh"]))
    run = torch.compile(lambda history: append(history, X), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="append wrote into its argument `history`, which was cast from float32 to bfloat16"):
        run(torch.zeros(2))
    history = low(torch.zeros(2))
    assert torch.equal(run(history), low(X) * 2)
    assert history.tolist() == [0, low(X).sum().item()]


def test_compiled_functions_of_the_users_have_their_containers_cast():
    @hmp.bf16_function
    def total(pair, named):
        return pair.one @ pair.other + sum(named[key] for key in named)

    def compiled(pair, named):
        return total(pair, named), named["x"]

    named = {"x": X, "y": Y, 3: X}
    hmp.convert(policy=policy(fp32=["tanh"]))
    run = torch.compile(compiled, backend="eager", fullgraph=True)
    for keys in (["x", "y", 3], ["x", "y"]):  # with a key less it is another function
        found = run(Pair(X, Y), {key: named[key] for key in keys})
        wanted = low(X) @ low(Y) + sum(low(named[key]) for key in keys)
        same(found, (wanted, X))  # and what the caller holds is as it was


@pytest.mark.parametrize("kind", [OrderedDict, Outputs])
def test_compiled_functions_of_the_users_have_dicts_of_other_classes_cast_outside_the_graph(kind):
    @hmp.bf16_function
    def product(named):
        assert type(named) is kind
        return (named.x if kind is Outputs else named["x"]) @ named["y"], named

    given = kind(x=X, y=Y)
    with hmp.casts(LISTS):
        found, named = torch.compile(lambda: product(given), backend="eager")()
    same([found, *named.values(), *given.values()], [low(X) @ low(Y), low(X), low(Y), X, Y])
    assert type(named) is kind


@pytest.mark.native_kernels
def test_r7_compiled_mixtures_that_kernels_alone_refuse():
    """Fake tensors take them, so that torch, asked while it traces, has nothing against them."""
    classes, weights = torch.arange(4), (torch.randn(16, 4), torch.randn(16, 4))

    def mixtures(x, y, cast=lambda t: t):
        state = cast(torch.zeros(1, 1, 4))
        recurrent = torch.lstm(low(x)[None], (state, state), [cast(w) for w in weights], False, 1, 0.0, False, False, True)
        return (
            low(x) @ cast(y),
            F.cross_entropy(low(x), classes, cast(y[0])),
            F.cross_entropy(low(x), y.softmax(-1)),  # probabilities: torch takes them
            torch.conv_tbc(low(x)[None], cast(y)[None], cast(y[0])),
            recurrent[0],
        )

    expected = mixtures(X, Y, low)
    hmp.convert(policy=policy(fp32=["tanh"]))
    same(torch.compile(mixtures, backend="eager", fullgraph=True)(X, Y), expected)


def test_r9_r12_compiled_running_statistics_move_in_float32_and_masks_stay_finite():
    image, norm, plain = torch.randn(4, 3, 8), torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    mask = torch.tensor([[0.0, torch.finfo(F32).min]]).expand(2, 2)
    expected = plain(low(image))

    def both(image, scores):
        return norm(image), torch.softmax(scores.bfloat16() + mask, -1)

    hmp.convert(policy=policy(bf16=["batch_norm", "add"], fp32=["softmax"]))
    found, weights = torch.compile(both, backend="eager", fullgraph=True)(image, torch.ones(2, 2))
    same((found, weights), (expected, torch.tensor([[1.0, 0.0], [1.0, 0.0]])))
    torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=1e-6, atol=1e-6)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_r12_compiled_a_number_that_varies_saturates_as_one_that_does_not(dynamic):
    def results(x, number):
        return [x.masked_fill(x > 0, number), x * number, x + number, number - x]

    compiled, x = torch.compile(results, backend="eager", dynamic=dynamic), torch.ones(2, dtype=torch.float16)
    hmp.convert(policy=policy(dtype=torch.float16))
    for number in (1.0, 2.0, -1e9, torch.inf, 3e38, -torch.inf, -3.0):
        most = torch.inf if abs(number) == torch.inf else 65504.0
        same(compiled(x, number), [torch.full((2,), each).clamp(-most, most).half() for each in (number, number, 1 + number, number - 1)])


def test_compiled_transforms_take_symbolic_sizes():
    hmp.convert(policy=policy(bf16=["linear"]))
    compiled = torch.compile(torch.func.grad(lambda x: F.linear(x, Y).float().sum()), backend="eager")
    for rows in (3, 5, 7):
        same(compiled(torch.ones(rows, 4)), low(Y).sum(0).float().expand(rows, 4))


class Square(torch.autograd.Function):
    """A function of the user's, whose backward uses a listed op."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.mul(x, x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.mul(x, grad.float() * 2.001)


def test_r13_compiled_autograd_function_runs_backward_without_lists():
    expected = X * (torch.ones_like(X) * 2.001)
    hmp.convert(policy=LOW)
    x = X.clone().requires_grad_()
    out = torch.compile(lambda x: Square.apply(x), backend="eager", fullgraph=True)(x)
    assert out.dtype is BF16
    out.float().sum().backward()
    same(x.grad, expected)


def test_r14_compiled_checkpoint_holds_its_casts():
    from torch.utils.checkpoint import checkpoint

    def block(x):
        return F.relu(x @ x)

    def run(x):
        return checkpoint(block, x, use_reentrant=False)

    grads = []
    for function in (lambda x: F.relu(low(x) @ low(x)), None):
        x = X.clone().requires_grad_()
        if function is None:
            hmp.convert(policy=LOW)
            function = torch.compile(run, backend="eager", fullgraph=True)
        out = function(x)
        with hmp.disable_casts():
            out.float().sum().backward()
        grads.append((out.detach(), x.grad))
    same(grads[1], grads[0])


def test_code_compiled_for_one_patched_function_is_not_run_for_another(fresh_compiler) -> None:
    """Guards of Dynamo's tell them apart, where a variable holds one, and where one is compiled itself."""

    def called(function, x):
        return function(x)

    own = types.ModuleType("own")
    own.product = lambda x: (x @ x.T).relu()
    hmp.register(own, "product", "bf16")
    x = torch.randn(3, 4)
    with hmp.convert(policy=hmp.Policy("some", bf16={"normalize", "relu", "tanh", "softsign"})):
        compiled = torch.compile(called, backend="eager", fullgraph=True)
        for function in (F.normalize, F.softsign, torch.tanh, torch.relu, torch.Tensor.tanh, torch.Tensor.relu, F.normalize, torch.tanh):
            want = function(x)
            assert want.dtype is torch.bfloat16 and torch.equal(compiled(function, x), want)
        for function in (F.normalize, own.product, torch.nn.Linear(4, 4), F.softsign, torch.tanh):
            want, found = function(x), torch.compile(function, backend="eager", fullgraph=True)(x)
            assert found.dtype is want.dtype and torch.equal(found, want)
