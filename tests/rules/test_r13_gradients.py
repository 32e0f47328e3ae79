"""R13: each leaf's gradient arrives in the leaf's own dtype, with the values of explicit casts, in first and higher derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from op_table import BF16_LIST, FP32_LIST, Op
from oracle import BF16, F16, F32, assert_identical, cast, flat
from strategies import Leaf, build
from thread_kit import in_thread
from trap_kit import policy, same

# a table of every listed op: more than the default command has time for
pytestmark = pytest.mark.slow

Call = Callable[..., Any]
MIXTURES = [(F32,), (BF16,), (F16,), (F32, BF16), (BF16, F32), (F16, BF16)]


def derivatives(call: Call, args: list[Any], orders: int = 2) -> list[torch.Tensor | None]:
    """The gradients of fixed combinations of the results, and the gradients of fixed combinations of those."""
    torch.manual_seed(5)  # random ops draw the same in both runs
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    found: list[torch.Tensor | None] = []
    ends = [r for r in flat(call(*args)) if isinstance(r, torch.Tensor) and r.requires_grad]
    for order in range(orders):
        weights = [torch.linspace(0.5, 1.5, e.numel()).reshape(e.shape).to(e.dtype) for e in ends]
        gradients = torch.autograd.grad(ends, leaves, weights, create_graph=True, allow_unused=True)
        if order == 0:
            assert None not in gradients
        found += gradients
        ends = [g for g in gradients if g is not None and g.requires_grad]
        if not ends:
            break
    for leaf, gradient in zip(itertools.cycle(leaves), found, strict=False):
        assert gradient is None or gradient.dtype is leaf.dtype
    return found


def assert_same_derivatives(policy: Any, call: Call, by_hand: Call, args: list[Any], orders: int = 2) -> None:
    """`call` under the policy has the first and second derivatives that `by_hand` has in plain torch, to the bit."""
    expected = derivatives(by_hand, args, orders)
    with hmp.casts(policy):
        got = derivatives(call, args, orders)
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one is None) == (other is None)
        if one is not None:
            assert_identical(one, other, f"derivative {number}")


def leaves_of(op: Op, dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    turn = itertools.cycle(dtypes)
    templates = [
        Leaf(a.shape, F32 if i in op.keep else next(turn), grad=a.grad, values=a.values, seed=i) if isinstance(a, Leaf) else a
        for i, a in enumerate(op.args)
    ]
    return build(templates)


def first_sites(ops: list[Op]) -> list[Any]:
    return [pytest.param(op, next(iter(op.sites.values())), id=f"{op.name}-{next(iter(op.sites))}") for op in ops]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("op", "call"), first_sites(BF16_LIST))
def test_r13_derivatives_of_ops_of_the_bf16_list(op: Op, call: Call) -> None:
    for dtypes in MIXTURES:
        by_hand = lambda *args: call(*(a if i in op.keep else cast(a, BF16) for i, a in enumerate(args)))  # noqa: E731
        assert_same_derivatives("habana", call, by_hand, leaves_of(op, dtypes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("op", "call"), first_sites(FP32_LIST))
def test_r13_derivatives_of_ops_of_the_fp32_list(op: Op, call: Call) -> None:
    for dtypes in MIXTURES:
        orders = 1 if op.name == "embedding_bag" else 2  # torch has no second derivative of weighted bags
        assert_same_derivatives("habana", call, lambda *args: call(*cast(args, F32)), leaves_of(op, dtypes), orders)


def tensors_of(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    turn = itertools.cycle(dtypes)
    return build([Leaf(shape, next(turn), grad=True, values="positive", seed=seed) for seed, shape in enumerate(shapes)])


def test_r13_an_operation_that_reads_a_cast_view_gives_its_leaf_a_gradient() -> None:
    listed = policy(bf16=["t", "transpose", "reshape", "unbind"])
    views: dict[str, Call] = {
        "t": lambda x: x.t(),
        "transpose": lambda x: x.transpose(0, 1),
        "reshape": lambda x: x.reshape(-1),
        "unbind": lambda x: x.unbind(0)[1],
        "a view of a view": lambda x: x.t().reshape(-1)[2:],
    }
    for name, view in views.items():
        args = tensors_of(((3, 4),), (F32,))
        assert_same_derivatives(listed, lambda x, v=view: v(x).sin(), lambda x, v=view: v(x.to(BF16)).sin(), args)
        assert_same_derivatives(listed, lambda x, v=view: v(x).sin(), lambda x, v=view: v(x).sin(), tensors_of(((3, 4),), (BF16,))), name


# --- leaves


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_r13_gradients_accumulate_into_the_one_that_is_there(dtype: torch.dtype) -> None:
    x = torch.randn(3, 3).to(dtype).requires_grad_()
    with hmp.casts("habana"):
        torch.mm(x, x).float().sum().backward()
        first = x.grad
        value = first.clone()
        torch.relu(x).float().sum().backward()
    assert x.grad is first and first.dtype is dtype
    same(x.grad, value + (x > 0).to(dtype))


def test_r13_the_gradient_of_what_is_no_leaf_has_that_tensors_dtype() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    with hmp.casts("habana"):
        hidden = torch.mm(x, x)
        loss = torch.softmax(hidden, -1).square().sum()
        to_hidden, to_x = torch.autograd.grad(loss, (hidden, x), retain_graph=True)
        loss.backward(inputs=[hidden])
    assert hidden.dtype is to_hidden.dtype is hidden.grad.dtype is BF16 and to_x.dtype is F32
    assert x.grad is None
    same(hidden.grad, to_hidden)


@pytest.mark.parametrize("low", [BF16, F16], ids=str)
def test_r13_float32_parameters_with_low_activations(low: torch.dtype) -> None:
    """What a mixed-precision model is: weights, a learned 0-dim scale and a norm in float32, activations in the low dtype."""
    weight, scale, gain = torch.randn(3, 4), torch.tensor(0.7), torch.rand(3)
    parameters = [p.clone().requires_grad_() for p in (weight, scale, gain)]
    by_hand = [p.clone().requires_grad_() for p in (weight, scale, gain)]
    x = torch.randn(2, 4).to(low)
    with hmp.casts(hmp.Policy.load("habana").replace(dtype=low)):
        w, s, g = parameters
        y = F.layer_norm(torch.relu(F.linear(x, w)) + s, (3,), g)
        F.cross_entropy(y, torch.tensor([0, 2])).backward()
    w, s, g = by_hand
    y = F.layer_norm(torch.relu(F.linear(x, w.to(low))) + s, (3,), g)
    F.cross_entropy(y.float(), torch.tensor([0, 2])).backward()
    for ours, theirs in zip(parameters, by_hand, strict=True):
        assert ours.grad.dtype is F32
        same(ours.grad, theirs.grad)


# --- graphs


def _in_a_thread(loss: torch.Tensor) -> None:
    in_thread(loss.backward)


def _inside_disabled(loss: torch.Tensor) -> None:
    with hmp.disable_casts():
        loss.backward()


def _under_another_policy(loss: torch.Tensor) -> None:
    with hmp.casts(policy(fp32=["mm"], bf16=["softmax"])):
        loss.backward()


def _after_revert(loss: torch.Tensor) -> None:
    hmp.revert()
    loss.backward()


@pytest.mark.parametrize("where", [_in_a_thread, _inside_disabled, _under_another_policy, _after_revert], ids=lambda f: f.__name__[1:])
def test_r13_gradients_are_the_same_wherever_backward_is_called(where: Callable[[torch.Tensor], None]) -> None:
    x = torch.randn(4, 4, requires_grad=True)

    def loss() -> torch.Tensor:
        with hmp.casts("habana"):
            return torch.softmax(torch.mm(x, x), -1).square().sum()

    loss().backward()
    expected, x.grad = x.grad, None
    where(loss())
    same(x.grad, expected)


def test_r13_anomaly_mode_names_the_op_and_changes_nothing() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    zero = torch.zeros(2, requires_grad=True)
    with hmp.casts("habana"):
        torch.softmax(torch.mm(x, x), -1).square().sum().backward()
        expected, x.grad = x.grad, None
        with torch.autograd.set_detect_anomaly(True):
            torch.softmax(torch.mm(x, x), -1).square().sum().backward()
            loss = torch.mul(zero.sqrt(), 0).float().sum()
            with pytest.warns(UserWarning, match="SqrtBackward0"), pytest.raises(RuntimeError, match="nan values"):
                loss.backward()
    same(x.grad, expected)
