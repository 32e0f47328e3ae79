"""Products that a list has in FP8 in compiled, exported and traced code: the results and the gradients of eager code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hmp
from compile_kit import BRIDGED
from fp8_oracle import PRODUCTS, RECIPES

ALL = hmp.Policy(fp8=set(PRODUCTS))


def layer(*shape: int) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 32), torch.randn(shape, requires_grad=True)


def run(function: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of the input and of all weights."""
    leaves = [x, *model.parameters()]
    y = function(x)
    gradient = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other), float((one - other).norm() / other.norm())


@pytest.mark.slow
@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_has_eagers_result_and_gradients(recipe: str) -> None:
    model, x = layer(2, 32, 64)
    with hmp.casts(ALL.replace(fp8_recipe=recipe)):
        same(run(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x), run(model, model, x))


@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "strict"), [("rowwise", True), ("tensorwise", False)])
def test_a_program_exported_without_gradients_is_in_fp8(recipe: str, strict: bool) -> None:
    model, x = layer(3, 48, 64)
    other = torch.randn(5, 48, 64)
    with hmp.casts(ALL.replace(fp8_recipe=recipe)), torch.no_grad():
        exported = torch.export.export(
            model, (x,), dynamic_shapes={"input": {0: torch.export.Dim("batch", min=2, max=64)}}, strict=strict
        ).module()
        wanted = model(other)
    assert torch.equal(exported(other), wanted)
    assert not torch.equal(wanted, torch.nn.functional.linear(*(t.bfloat16() for t in (other, model.weight, model.bias))))


@pytest.mark.slow
@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
def test_one_with_gradients_is_in_the_low_dtype_and_counted() -> None:
    """An exported graph has no autograd.Function: gradients would be those of the rounding's steps."""
    model, x = layer(32, 64)
    before = sum(hmp.fallbacks().values())
    with hmp.casts(ALL):
        exported = torch.export.export(model, (x,), strict=False).module()
    assert sum(hmp.fallbacks().values()) > before
    assert any("export under torch.no_grad()" in reason for reason in hmp.fallbacks())
    with hmp.casts(hmp.Policy(bf16={"linear"})):
        wanted = run(model, model, x)
    y = exported(x)
    gradient = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    same([y.detach(), *torch.autograd.grad(y, [x, *exported.parameters()], gradient)], wanted)


def test_a_traced_product_is_not_decided_again_inside() -> None:
    """torch's decompositions are Python, and call the op that they are of."""
    model, x = layer(32, 64)
    weight = model.weight.detach()
    from torch.fx.experimental.proxy_tensor import make_fx

    with hmp.casts(ALL):
        traced = make_fx(torch.nn.functional.linear, tracing_mode="fake")(x.detach(), weight)
        wanted = torch.nn.functional.linear(x.detach(), weight)
    assert torch.equal(traced(x.detach(), weight), wanted)
