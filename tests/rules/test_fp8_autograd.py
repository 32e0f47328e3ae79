"""FP8 products inside autograd: what is saved, what is refused, and what trains around them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hmp
from fp8_oracle import RECIPES, in_fp8

BF16 = torch.bfloat16


class Linear(torch.nn.Linear):
    """A layer that runs in FP8, with no state of its own for it."""

    recipe = "tensorwise"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return in_fp8("linear", input, self.weight, self.bias, recipe=self.recipe)


def model(recipe: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [Linear(32, 64), torch.nn.GELU(), Linear(64, 32)]
    layers[0].recipe = layers[2].recipe = recipe
    return torch.nn.Sequential(*layers)


def grads(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


# rows 40 (48 or 64 for blocks), inner 64, outer 32
@pytest.mark.parametrize(
    ("recipe", "nbytes"),
    [
        # both operands as they are, and one scale each
        ("tensorwise", 40 * 64 + 64 * 32 + 2 * 4),
        # both along the other axis, a scale for each of the 64 columns of either
        ("rowwise", 40 * 64 + 64 * 32 + 2 * 64 * 4),
        # the input in bfloat16, the weight with one scale
        ("rowwise_with_gw_hp", 2 * 40 * 64 + 64 * 32 + 4),
        # 40 rows are two blocks of 32; a byte for the scale of each
        ("mxfp8", 64 * 64 + 2 * 64 + 64 * 32 + 64),
    ],
)
def test_one_byte_an_element_is_saved(recipe: str, nbytes: int) -> None:
    for dtype in (torch.float32, BF16):
        x, w = torch.randn(40, 64, dtype=dtype, requires_grad=True), torch.randn(32, 64, dtype=dtype, requires_grad=True)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda given, to=saved: (to.append(given), given)[1], lambda given: given):
            y = in_fp8("linear", x, w, recipe=recipe)
        assert sum(each.nbytes for each in saved) == nbytes
        y.sum().backward()
        assert x.grad is not None and w.grad is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_saved_for_a_gradient_that_nobody_needs(recipe: str) -> None:
    x, w = torch.randn(32, 64), torch.randn(32, 64)
    for first, second in ((x.clone().requires_grad_(), w), (x, w.clone().requires_grad_())):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda given, to=saved: (to.append(given), given)[1], lambda given: given):
            y = in_fp8("linear", first, second, recipe=recipe)
        assert len(saved) == (1 if recipe == "rowwise_with_gw_hp" and second.requires_grad else 2)
        y.sum().backward()
        assert (first.grad is None) != (second.grad is None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_write_between_forward_and_backward_changes_no_gradient(recipe: str) -> None:
    """The copies are the product's own: nothing is computed from memory that was written since."""
    found = []
    for writes in (False, True):
        torch.manual_seed(0)
        x, w = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
        y = in_fp8("linear", x, w, recipe=recipe)
        if writes:
            with torch.no_grad():
                x.mul_(3)
                w.zero_()
        y.sum().backward()
        found.append([x.grad, w.grad])
    assert same(*found)


@pytest.mark.parametrize("op", ["linear", "bmm"])
def test_a_second_derivative_is_an_error_that_says_what_to_do(op: str) -> None:
    x, w = torch.randn(2, 32, 32, requires_grad=True), torch.randn(2, 32, 32, requires_grad=True)
    for recipe in RECIPES:
        loss = in_fp8(op, x, w[0] if op == "linear" else w, recipe=recipe).float().square().sum()
        with pytest.raises(hmp.HmpError, match=rf"create_graph=True.*{op} off the FP8 list.*disable_casts"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_around_a_product_leaves_its_gradients_as_they_are(recipe: str) -> None:
    """A graph that is used twice, checkpoints, and saved tensors that are kept elsewhere."""
    net, x = model(recipe), torch.randn(16, 32, requires_grad=True)
    y = net(x)
    y.sum().backward(retain_graph=True)
    plain = [each.clone() for each in grads(net)]
    y.sum().backward()
    assert same(grads(net), [2 * each for each in plain]) and x.grad.dtype is torch.float32

    def pack(given: torch.Tensor) -> bytes:
        buffer = io.BytesIO()
        torch.save(given, buffer)
        return buffer.getvalue()

    def elsewhere() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda given: torch.load(io.BytesIO(given))):
            return net(x)

    for forward in (elsewhere, *(lambda each=each: checkpoint(net, x, use_reentrant=each) for each in (True, False))):
        net.zero_grad()
        forward().sum().backward()
        assert same(grads(net), plain)


# --- transforms: they run in the low-precision dtype, and a caller that does not ask is told ----------------------------------------


def forward_mode(function: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, x), w)


TRANSFORMS: dict[str, Any] = {
    "grad": lambda function, x, w: torch.func.grad(lambda t: function(t, w).sum())(x),
    "jvp": lambda function, x, w: torch.func.jvp(lambda t: function(t, w), (x,), (x,)),
    "forward mode": forward_mode,
    "jit.trace": lambda function, x, w: torch.jit.trace(function, (x, w)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_refused_with_a_reason(name: str) -> None:
    given = torch.randn(16, 32), torch.randn(32, 32)
    with hmp.casts(hmp.Policy(fp8={"linear"})):
        found = TRANSFORMS[name](torch.nn.functional.linear, *given)
    (reason,) = hmp.fallbacks()
    assert reason.endswith("torch.func, forward-mode differentiation or torch.jit.trace")
    if name != "jit.trace":
        wanted = TRANSFORMS[name](lambda x, w: torch.nn.functional.linear(x.to(BF16), w.to(BF16)), *given)
        assert all(torch.equal(*pair) for pair in zip(tree_leaves(found), tree_leaves(wanted), strict=True))
