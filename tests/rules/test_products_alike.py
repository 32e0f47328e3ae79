"""What holds of products on the FP8 list and on the fp32_result list alike: out=, what is around them, gradients, and transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from fp8_oracle import RECIPES, function
from strategies import Tagged
from trap_kit import same

F32, BF16 = torch.float32, torch.bfloat16
EACH = pytest.mark.parametrize("kind", [*RECIPES, "fp32_result"])


def listed(kind: str, op: str) -> hmp.Policy:
    return hmp.Policy(fp32_result={op}) if kind == "fp32_result" else hmp.Policy(fp8={op}, fp8_recipe=kind)


def called(kind: str, op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    before = hmp.fallbacks()
    with hmp.casts(listed(kind, op)):
        found = function(op)(*args, **kwargs)
    assert hmp.fallbacks() == before
    return found


def made(*shapes: tuple[int, ...], grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


@EACH
def test_r6_out_takes_the_result_in_its_own_dtype(kind: str) -> None:
    a, b, c, square = made((24, 64), (64, 32), (24, 32), (32, 32), grad=False)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("mm", (a, b)), ("matmul", (a, b)), ("matmul", (a[None], b)), ("addmm", (c, a, b)), ("addmm", (c[0], a, b)),
        ("bmm", (a[None], b[None])), ("baddbmm", (c[None], a[None], b[None])),
    ]  # fmt: skip
    calls += [("addbmm", (c, a[None], b[None]))] if kind != "fp32_result" else []
    for op, args in calls:
        wanted = called(kind, op, *args)
        for dtype in (F32,) if kind == "fp32_result" else (BF16, F32):
            out = torch.full(wanted.shape, 7.0, dtype=dtype)
            assert called(kind, op, *args, out=out) is out
            same(out, wanted.to(dtype))
    for op, others in (("addmm", (square, square)), ("mm", (square,))):
        into_itself = square.clone()
        called(kind, op, into_itself, *others, out=into_itself)
        same(into_itself, called(kind, op, square, *others).float())


@EACH
def test_r8_r17_what_a_product_is_made_of_is_not_cast(kind: str) -> None:
    """With every op of torch on a list, or in a region of torch.autocast, the product is what it is without."""
    x, w, b = made((16, 64), (32, 64), (32,))

    def results(policy: hmp.Policy, *args: torch.Tensor) -> list[torch.Tensor]:
        with hmp.casts(policy):
            found = F.linear(*args)
        return [found, *torch.autograd.grad(found, args, torch.ones_like(found))]

    alone = listed(kind, "linear")
    for args in ((x, w, b), (x, w[0])) if kind == "fp32_result" else ((x, w, b),):  # a vector's product is made of casts
        wanted = results(alone, *args)
        with torch.autocast("cpu", torch.float16):
            same(results(alone, *args), wanted)
        for lists in ({"bf16": {"*"}}, {"fp32": {"*"}}):
            same(results(alone.replace(**lists), *args), wanted)


@EACH
def test_a_write_between_forward_and_backward_changes_no_gradient(kind: str) -> None:
    """The copies are the product's own: nothing is computed from memory that was written since."""
    found = []
    for factor in (1, 3):
        x, w = made((32, 64), (32, 64))
        y = called(kind, "linear", x, w)
        with torch.no_grad():
            x.mul_(factor)
            w.mul_(factor)
        found.append(torch.autograd.grad(y.sum(), (x, w)))
    same(*found)


@EACH
@pytest.mark.parametrize("op", ["linear", "bmm"])
def test_a_second_derivative_is_an_error_that_says_what_to_do(op: str, kind: str) -> None:
    x, w = made((2, 32, 32), (2, 32, 32))
    loss = called(kind, op, x, w[0] if op == "linear" else w).float().square().sum()
    name = "fp32_result" if kind == "fp32_result" else "FP8"
    with pytest.raises(hmp.HmpError, match=rf"create_graph=True.*off the {name} list.*disable_casts"):
        torch.autograd.grad(loss, x, create_graph=True)


# --- transforms and subclasses: torch's own op, with casts; off the FP8 list a caller that does not ask is told ----------------------


def forward_mode(function: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, x), w)


TRANSFORMS: dict[str, Any] = {
    "grad": lambda function, x, w: torch.func.grad(lambda t: function(t, w).square().sum())(x),
    "twice": lambda function, x, w: torch.func.hessian(lambda t: function(t, w).square().sum())(x[:2]),
    "vmap": lambda function, x, w: torch.func.vmap(function, (0, None))(torch.stack([x, x]), w),
    "jvp": lambda function, x, w: torch.func.jvp(lambda t: function(t, w), (x,), (x,)),
    "forward mode": forward_mode,
    "jit.trace": lambda function, x, w: torch.jit.trace(function, (x, w))(x, w),
    "a subclass": lambda function, x, w: function(x.as_subclass(Tagged), w).as_subclass(torch.Tensor),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["rowwise", "fp32_result"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_has_the_values_of_casts(name: str, kind: str) -> None:
    hmp.revert()  # with what is counted
    x, w = made((16, 32), (32, 32), grad=False)
    with hmp.casts(listed(kind, "linear")):
        found = TRANSFORMS[name](F.linear, x, w)
    if kind != "fp32_result":
        (reason,) = hmp.fallbacks()
        why = "a tensor subclass" if name == "a subclass" else "torch.func, forward-mode differentiation or torch.jit.trace"
        assert reason == f"linear: not in FP8, {why}"
    dtype = F32 if kind == "fp32_result" else BF16
    same(found, TRANSFORMS[name](lambda x, w: F.linear(x.to(BF16).to(dtype), w.to(BF16).to(dtype)), x, w))
