"""R13: each leaf's gradient arrives in the leaf's own dtype, with the values of explicit casts, in first and higher derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hmp
from op_table import BF16_LIST, FP32_LIST, Op
from oracle import BF16, F16, F32, assert_identical, cast, flat
from strategies import Leaf, build
from thread_kit import in_thread
from trap_kit import policy, same

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


def leaves_of(op: Op, dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    turn = itertools.cycle(dtypes)
    templates = [
        Leaf(a.shape, F32 if i in op.keep else next(turn), grad=a.grad, values=a.values, seed=i) if isinstance(a, Leaf) else a
        for i, a in enumerate(op.args)
    ]
    return build(templates)


EACH_OP = [
    pytest.param(dtype, op, id=f"{op.name}-{next(iter(op.sites))}") for dtype, ops in ((BF16, BF16_LIST), (F32, FP32_LIST)) for op in ops
]


@pytest.mark.native_kernels  # test_r11_no_instructions.py has the derivatives of what computes in float32
@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "op"), EACH_OP)
def test_r13_first_and_second_derivatives_are_those_of_explicit_casts(dtype: torch.dtype, op: Op) -> None:
    call = next(iter(op.sites.values()))
    orders = 1 if op.name == "embedding_bag" else 2  # torch has no second derivative of weighted bags

    def by_hand(*args: Any) -> Any:
        return call(*(a if i in op.keep else cast(a, dtype) for i, a in enumerate(args)))

    for dtypes in MIXTURES:
        args = leaves_of(op, dtypes)
        expected = derivatives(by_hand, args, orders)
        with hmp.casts("habana"):
            got = derivatives(call, args, orders)
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert (one is None) == (other is None)
            if one is not None:
                assert_identical(one, other, f"derivative {number}")


def _inside_disabled(loss: torch.Tensor) -> None:
    with hmp.disable_casts():
        loss.backward()


def _under_another_policy(loss: torch.Tensor) -> None:
    with hmp.casts(policy(fp32=["mm"], bf16=["softmax"])):
        loss.backward()


def _after_revert(loss: torch.Tensor) -> None:
    hmp.revert()
    loss.backward()


@pytest.mark.parametrize(
    "where",
    [lambda loss: in_thread(loss.backward), _inside_disabled, _under_another_policy, _after_revert],
    ids=["thread", "disabled", "another policy", "after revert"],
)
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
