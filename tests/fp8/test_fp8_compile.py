"""FP8 products under torch.compile and torch.export: whole graphs, and eager's numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from hmp.fp8 import PRODUCTS, RECIPES, why_not

NAMES = list(RECIPES)
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


class Block(torch.nn.Module):
    """A linear layer and a batched product, each in FP8 where why_not() has no reason against it."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.linear = torch.nn.Linear(64, 32)

    def product(self, op: str, *args: torch.Tensor) -> torch.Tensor:
        recipe = RECIPES[self.recipe]
        assert not why_not(op, args, {}, recipe, BF16)
        return PRODUCTS[op](*args, recipe=recipe, low=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.product("linear", x, self.linear.weight, self.linear.bias))
        return self.product("matmul", y, y.mT.contiguous()[:, :, :32])


def run(module: torch.nn.Module, function: object, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = function(leaf)
    y.float().square().mean().backward()
    return [y.detach(), leaf.grad, *(parameter.grad.clone() for parameter in module.parameters())]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("recipe", NAMES)
def test_one_graph_gives_eagers_numbers(recipe: str) -> None:
    block = Block(recipe)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 48, 64)
    assert all(torch.equal(*pair) for pair in zip(run(block, compiled, x), run(block, block, x), strict=True))


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_of_other_shapes_and_without_gradients_give_eagers_numbers(recipe: str, backend: str) -> None:
    block = Block(recipe)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for rows in (48, 33, 64, 35):
        x = torch.randn(3, rows, 64)
        assert all(torch.equal(*pair) for pair in zip(run(block, compiled, x), run(block, block, x), strict=True))
    with torch.no_grad():
        assert torch.equal(compiled(x), block(x))


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.usefixtures("inductor_has_compiled")
@pytest.mark.parametrize("recipe", NAMES)
def test_inductor_rounds_to_fp8_where_eager_does(recipe: str) -> None:
    """It leaves out roundings to the low dtype, as everywhere: 0.003. An FP8 one left out would be a difference of 0.03.

    One product, because a product of its result would round other numbers to FP8.
    """
    x, w, b = torch.randn(96, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True), torch.randn(32)
    grad = torch.randn(96, 32).to(BF16)

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return PRODUCTS["linear"](x, w, b, recipe=RECIPES[recipe], low=BF16)

    found, wanted = ([y, *torch.autograd.grad(y, (x, w), grad)] for y in (torch.compile(linear, fullgraph=True)(x, w), linear(x, w)))
    for mine, eager in zip(found, wanted, strict=True):
        assert float((mine.detach().float() - eager.detach().float()).norm() / eager.detach().float().norm()) < 0.005


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.usefixtures("inductor_has_compiled")
@pytest.mark.parametrize("recipe", NAMES)
def test_inductor_compiles_a_product_of_a_result_with_itself(recipe: str) -> None:
    """One bfloat16 tensor is quantised along both of its axes there, for which inductor once wrote C++ that no compiler takes."""
    layer, x = torch.nn.Linear(32, 32), torch.randn(4, 32, 32)

    def scores(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return y @ y.transpose(-1, -2)

    with hmp.casts(hmp.Policy(fp8={"linear", "matmul"}, fp8_recipe=recipe)):
        for run in (torch.compile(scores, fullgraph=True), scores):
            layer.zero_grad()
            y = run(x)
            y.float().pow(2).sum().backward()
            exact, gradient = y.detach().float(), layer.weight.grad
            reference = torch.nn.functional.linear(x, layer.weight.detach(), layer.bias.detach())
            assert float((exact - reference @ reference.mT).norm() / (reference @ reference.mT).norm()) < 0.06
            assert gradient is not None
            assert gradient.isfinite().all()
            assert float(gradient.norm()) > 0


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("recipe", NAMES)
def test_a_compiled_checkpoint(recipe: str) -> None:
    block = Block(recipe)

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)

    x = torch.randn(2, 48, 64)
    compiled = torch.compile(recomputed, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(*pair) for pair in zip(run(block, compiled, x), run(block, block, x), strict=True))


@pytest.mark.slow
def test_a_compiled_second_derivative_is_an_error() -> None:
    w = torch.randn(32, 64, requires_grad=True)
    x = torch.randn(16, 64, requires_grad=True)
    compiled = torch.compile(lambda: PRODUCTS["linear"](x, w, recipe=RECIPES["rowwise"], low=BF16), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(torch.autograd.grad(compiled().float().square().sum(), x, create_graph=True)[0].sum(), w)


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_gives_eagers_numbers(recipe: str, strict: bool) -> None:
    block = Block(recipe)
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():  # an exported graph has no autograd.Function: where a gradient is needed why_not() refuses
        program = torch.export.export(block, (torch.randn(3, 48, 64),), dynamic_shapes={"x": {0: batch}}, strict=strict)
    x = torch.randn(5, 48, 64)
    assert torch.equal(program.module()(x), block(x))
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    dtypes = [each for graph in graphs for node in graph.nodes for each in (*node.args, *node.kwargs.values())]
    assert E4M3 in dtypes
