"""R13: gradients wherever backward is called; torch.func, torch.autograd.functional and forward mode go through listed ops.

Random graphs and the gradients of single calls P9 and P1 ask (tests/properties).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import hmp
from oracle import BF16, F16, F32, saturated
from trap_kit import policy, same

pytestmark = pytest.mark.native_kernels  # second derivatives are compared bit for bit


# --- torch.func and torch.autograd.functional


def loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w: function(x, w).square().sum()


AF, TF = torch.autograd.functional, torch.func
X, W = torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(1, -2, 9).reshape(3, 3).sin()
TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor]], Any]] = {
    "func.grad": lambda f: TF.grad(loss(f), (0, 1))(X, W),
    "func.vjp": lambda f: TF.vjp(f, X, W)[1](torch.ones(2, 3)),
    "func.jvp": lambda f: TF.jvp(f, (X, W), (X, W)),
    "func.jacrev": lambda f: TF.jacrev(f, (0, 1))(X, W),
    "func.jacfwd": lambda f: TF.jacfwd(f, (0, 1))(X, W),
    "func.hessian": lambda f: TF.hessian(loss(f), (0, 1))(X, W),
    "func.vmap of grad": lambda f: TF.vmap(TF.grad(loss(f), 1), (0, None))(X[:, None], W),
    "functional.vjp": lambda f: AF.vjp(f, (X, W), torch.ones(2, 3)),
    "functional.jvp": lambda f: AF.jvp(f, (X, W), (X, W)),
    "functional.hvp": lambda f: AF.hvp(loss(f), (X, W), (X, W)),
    "functional.jacobian": lambda f: AF.jacobian(f, (X, W)),
    "functional.jacobian vectorised": lambda f: AF.jacobian(f, (X, W), vectorize=True),
    "functional.jacobian forward": lambda f: AF.jacobian(f, (X, W), vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f: AF.hessian(loss(f), (X, W)),
}


def test_r13_transforms_put_their_results_together_without_casts() -> None:
    """Every op and view on the BF16 list: the user's function is cast, what torch stacks, splits and reshapes is not."""
    views = ["stack", "cat", "split", "reshape", "view", "movedim", "unbind", "diagonal", "unsqueeze", "squeeze", "expand"]
    uncast = {"func.jvp", "func.vjp"}  # their first result is the function's own

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, w)
        assert y.dtype is BF16
        return y.float()

    for name, transform in TRANSFORMS.items():
        with hmp.casts(policy(bf16=[*views, "matmul"])):
            got = tree_leaves(transform(function))
        assert {t.dtype for t in got[name in uncast :]} == {F32}, name
        for ours, theirs in zip(got, tree_leaves(transform(lambda x, w: torch.matmul(x, w))), strict=True):
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
        "view": (lambda x: x.t(), lambda x: x.t()),
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


def test_r13_the_gradient_of_a_saturated_mask_sum_is_that_of_the_scores() -> None:
    scores = torch.randn(4, 4).to(F16).requires_grad_()
    mask = torch.full((4, 4), torch.finfo(F32).min).triu(1)
    with hmp.casts(policy(fp32=["softmax"], bf16=["add"], dtype=F16)):
        torch.softmax(scores + mask, -1).square().sum().backward()
    got, scores.grad = scores.grad, None
    torch.softmax((scores + saturated(mask, F16)).float(), -1).square().sum().backward()
    assert torch.isfinite(got).all() and got.any()
    same(got, scores.grad)


# --- Tensor.grad_dtype: float32 gradients of low-precision weights

HAS_GRAD_DTYPE = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="Tensor.grad_dtype is new in torch 2.12")
INPUT = torch.linspace(-1, 1, 15).reshape(5, 3)
USES: dict[str, tuple[list[tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "linear": ([(4, 3), (4,)], lambda w, b: F.linear(INPUT, w, b)),
    "matmul": ([(3, 4)], lambda w: INPUT @ w),
    "used twice": ([(3, 3)], lambda w: F.linear(F.linear(INPUT, w), w)),
    "conv1d": ([(2, 5, 2), (2,)], lambda w, b: F.conv1d(INPUT[None], w, b)),
    "layer_norm": ([(3,), (3,)], lambda w, b: F.layer_norm(INPUT, (3,), w, b)),
    "batch_norm": ([(3,), (3,)], lambda w, b: F.batch_norm(INPUT, torch.zeros(3), torch.ones(3), w, b, True)),
    "mul": ([(3,)], lambda w: INPUT * w),
    "gru_cell": ([(12, 3), (12, 4)], lambda w, u: torch.gru_cell(INPUT, torch.zeros(5, 4), w, u)),
}


def weights_of(use: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(BF16) for shape in USES[use][0]]


@HAS_GRAD_DTYPE
@pytest.mark.parametrize("use", USES)
def test_r13_a_float32_gradient_of_a_bfloat16_weight_is_not_rounded_where_the_weight_is_cast_up(use: str) -> None:
    """It is that of a float32 weight of the same values."""
    run, lists = USES[use][1], hmp.Policy(fp32="linear matmul conv1d layer_norm batch_norm mul gru_cell".split())
    wide = [weight.float().requires_grad_() for weight in weights_of(use)]
    run(*wide).pow(3).sum().backward()
    for is_parameter in (True, False):
        low = [torch.nn.Parameter(w) if is_parameter else w.requires_grad_() for w in weights_of(use)]
        for weight in low:
            weight.grad_dtype = F32
        for _ in range(2):
            for weight in low:
                weight.grad = None
            with hmp.casts(lists):
                run(*low).pow(3).sum().backward()
        assert [w.grad.dtype for w in low] == [F32] * len(low)
        assert all(torch.equal(w.grad, want.grad) for w, want in zip(low, wide, strict=True))


@HAS_GRAD_DTYPE
def test_r13_without_grad_dtype_a_bfloat16_weight_has_a_bfloat16_gradient() -> None:
    low = torch.nn.Parameter(torch.randn(4, 3).to(BF16))
    with hmp.casts(hmp.Policy(fp32={"linear"})):
        F.linear(INPUT, low).sum().backward()
    assert low.grad.dtype is BF16
