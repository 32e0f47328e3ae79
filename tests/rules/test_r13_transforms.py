"""R13: torch.func, torch.autograd.functional and forward mode go through listed ops; random graphs follow explicit casts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import hmp
from oracle import BF16, F16, F32, saturated
from trap_kit import policy, same

# more than the default command has time for; second derivatives are compared bit for bit
pytestmark = [pytest.mark.slow, pytest.mark.native_kernels]


# --- torch.func and torch.autograd.functional


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.softmax(F.linear(torch.relu(x) * 2, w), -1) / 3


def model_by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    low = torch.relu(x.to(BF16)) * 2
    return F.softmax(F.linear(low, w.to(BF16)).float(), -1) / 3


def loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w: function(x, w).square().sum()


AF, TF = torch.autograd.functional, torch.func
X, W = torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(1, -2, 9).reshape(3, 3).sin()
TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor]], Any]] = {
    "func.grad": lambda f: TF.grad(loss(f), (0, 1))(X, W),
    "func.grad_and_value": lambda f: TF.grad_and_value(loss(f))(X, W),
    "func.vjp": lambda f: TF.vjp(f, X, W)[1](torch.ones(2, 3)),
    "func.jvp": lambda f: TF.jvp(f, (X, W), (X, W)),
    "func.jacrev": lambda f: TF.jacrev(f, (0, 1))(X, W),
    "func.jacrev in chunks": lambda f: TF.jacrev(f, (0, 1), chunk_size=2)(X, W),
    "func.jacfwd": lambda f: TF.jacfwd(f, (0, 1))(X, W),
    "func.hessian": lambda f: TF.hessian(loss(f), (0, 1))(X, W),
    "func.vmap of grad": lambda f: TF.vmap(TF.grad(loss(f), 1), (0, None))(X[:, None], W),
    "func.functional_call": lambda f: TF.grad(lambda w: loss(f)(X, w))(W),
    "functional.vjp": lambda f: AF.vjp(f, (X, W), torch.ones(2, 3)),
    "functional.jvp": lambda f: AF.jvp(f, (X, W), (X, W)),
    "functional.vhp": lambda f: AF.vhp(loss(f), (X, W), (X, W)),
    "functional.hvp": lambda f: AF.hvp(loss(f), (X, W), (X, W)),
    "functional.jacobian": lambda f: AF.jacobian(f, (X, W)),
    "functional.jacobian vectorised": lambda f: AF.jacobian(f, (X, W), vectorize=True),
    "functional.jacobian forward": lambda f: AF.jacobian(f, (X, W), vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f: AF.hessian(loss(f), (X, W)),
    "functional.hessian vectorised": lambda f: AF.hessian(loss(f), (X, W), vectorize=True),
    "functional.hessian forward": lambda f: AF.hessian(loss(f), (X, W), vectorize=True, outer_jacobian_strategy="forward-mode"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_r13_transforms_give_what_they_give_with_explicit_casts(name: str) -> None:
    expected = tree_leaves(TRANSFORMS[name](model_by_hand))
    with hmp.casts("habana"):
        got = tree_leaves(TRANSFORMS[name](model))
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype is F32
        same(ours, theirs)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_r13_transforms_put_their_results_together_without_casts(name: str) -> None:
    """Every op and view on the BF16 list: the user's function is cast, what torch stacks, splits and reshapes is not."""
    views = ["stack", "cat", "split", "reshape", "view", "movedim", "unbind", "diagonal", "unsqueeze", "squeeze", "expand"]
    uncast = {"func.jvp", "func.vjp"}  # their first result is the function's own

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, w)
        assert y.dtype is BF16
        return y.float()

    with hmp.casts(policy(bf16=[*views, "matmul"])):
        got = tree_leaves(TRANSFORMS[name](function))
    assert {t.dtype for t in got[name in uncast :]} == {F32}
    for ours, theirs in zip(got, tree_leaves(TRANSFORMS[name](lambda x, w: torch.matmul(x, w))), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=3e-2, atol=3e-2)


def test_r13_what_a_transform_gives_back_follows_the_casts_where_it_is_called() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.matmul(x, x).dtype)
        return torch.matmul(x, x).float().sum()

    for transform in (TF.grad, TF.jacrev, TF.jacfwd, TF.hessian):
        made_outside = transform(function)
        with hmp.casts("habana"):
            made_inside = transform(function)
            made_outside(W)
        assert set(seen) == {BF16}
        seen.clear()
        made_inside(W)
        assert set(seen) == {F32}
        seen.clear()


# --- forward mode


def test_r13_a_dual_tensor_keeps_its_tangent_through_casts() -> None:
    ops: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
        "bf16": (lambda x: torch.matmul(x, x), lambda x: torch.matmul(x.to(BF16), x.to(BF16))),
        "fp32": (lambda x: torch.log(x.abs() + 1), lambda x: torch.log((x.abs() + 1).float())),
        "promote": (lambda x: torch.cat([x, x.to(BF16)]), lambda x: torch.cat([x.float(), x.to(BF16).float()])),
        "view": (lambda x: x.t(), lambda x: x.to(BF16).t()),
        "saturating": (lambda x: x * 3e38, lambda x: x * 3e38),
        "norm": (lambda x: F.layer_norm(x, (3,)), lambda x: F.layer_norm(x.to(BF16), (3,))),
        "first": (lambda x: x.to(BF16).index_add(0, torch.tensor([0]), x[:1]), _index_add_by_hand),
        "in place": (lambda x: x.clone().mul_(x.to(BF16)), lambda x: x.clone().mul_(x.to(BF16))),
    }
    for name, (call, by_hand) in ops.items():
        with forward_ad.dual_level():
            expected = forward_ad.unpack_dual(by_hand(forward_ad.make_dual(W.clone(), W.cos())))
            with hmp.casts("habana"):
                got = forward_ad.unpack_dual(call(forward_ad.make_dual(W.clone(), W.cos())))
            assert got.tangent is not None, name
            if name != "saturating":
                same(got.primal.as_subclass(torch.Tensor), expected.primal)
                same(got.tangent.as_subclass(torch.Tensor), expected.tangent)


def _index_add_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x.to(BF16).index_add(0, torch.tensor([0]), x[:1].to(BF16))


# --- random graphs

LOW_OPS = ("matmul", "relu", "leaky_relu", "mul")
WIDE_OPS = ("softmax", "log_softmax", "truediv")
FREE_OPS = ("sin", "sum_rows", "add", "maximum", "baddbmm")


@dataclass(frozen=True)
class Step:
    """One op of a random graph, applied to nodes before it."""

    op: str
    one: int
    other: int


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[torch.dtype], list[Step]]:
    leaves = draw(st.lists(st.sampled_from([F32, BF16, F16]), min_size=1, max_size=3))
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 6))):
        node = st.integers(0, len(leaves) + len(steps) - 1)
        steps.append(Step(draw(st.sampled_from(LOW_OPS + WIDE_OPS + FREE_OPS)), draw(node), draw(node)))
    return leaves, steps


def plainly(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The op as a user writes it."""
    return {
        "matmul": lambda: a @ b,
        "relu": lambda: torch.relu(a),
        "leaky_relu": lambda: F.leaky_relu(a, 0.1),
        "mul": lambda: a * b,
        "softmax": lambda: F.softmax(a, -1),
        "log_softmax": lambda: a.log_softmax(-1),
        "truediv": lambda: a / 3.0,
        "sin": lambda: a.sin(),
        "sum_rows": lambda: a.sum(0, keepdim=True).expand(3, 3),
        "add": lambda: a + b,
        "maximum": lambda: torch.maximum(a, b),
        "baddbmm": lambda: torch.baddbmm(a[None], b[None], b[None])[0],
    }[op]()


def with_casts(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The op in plain torch with Habana's lists written out by hand; one operand is cast for each of its uses."""
    if op in LOW_OPS:
        # R12: nothing here is beyond bfloat16, so that saturating is the plain cast
        return plainly(op, a.to(BF16), b.to(BF16))
    if op in WIDE_OPS:
        return plainly(op, a.float(), b.float())
    if op == "baddbmm":
        wide = torch.promote_types(a.dtype, b.dtype)
        return torch.baddbmm(a[None].to(wide), b[None].to(wide), b[None].to(wide))[0]
    return plainly(op, a, b)


def gradients(leaves: list[torch.Tensor], steps: list[Step], apply: Callable[..., torch.Tensor]) -> list[torch.Tensor | None]:
    nodes = list(leaves)
    for step in steps:
        nodes.append(apply(step.op, nodes[step.one], nodes[step.other]))
    total = nodes[-1].float().sum() + sum(n.float().mean() for n in nodes[len(leaves) :])
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


@settings(max_examples=150)
@given(graph=graphs(), seed=st.integers(0, 2**16))
def test_r13_random_graphs_have_the_gradients_of_explicit_casts(graph: tuple[list[torch.dtype], list[Step]], seed: int) -> None:
    dtypes, steps = graph
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(3, 3, generator=generator).to(d).requires_grad_() for d in dtypes]
    expected = gradients(leaves, steps, with_casts)
    with hmp.casts("habana"):
        got = gradients(leaves, steps, plainly)
    for leaf, ours, theirs in zip(leaves, got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype is leaf.dtype
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), steps


# --- saturation


def test_r13_the_gradient_of_a_saturated_mask_sum_is_that_of_the_scores() -> None:
    scores = torch.randn(4, 4).to(F16).requires_grad_()
    mask = torch.full((4, 4), torch.finfo(F32).min).triu(1)
    with hmp.casts(policy(fp32=["softmax"], bf16=["add"], dtype=F16)):
        torch.softmax(scores + mask, -1).square().sum().backward()
    got, scores.grad = scores.grad, None
    torch.softmax((scores + saturated(mask, F16)).float(), -1).square().sum().backward()
    assert torch.isfinite(got).all() and got.any()
    same(got, scores.grad)
