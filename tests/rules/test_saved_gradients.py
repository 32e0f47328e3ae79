"""Gradients of packed numbers, which are to the last bit those of ops that get quantised tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
import saved_oracle as oracle

OPS = frozenset({"linear", "gelu", "softmax", "layer_norm", "dropout", "scaled_dot_product_attention"})
RECIPES = ("fp8", "bf16", "int8")


class Plain:
    """The ops, as a model calls them."""

    def first(self, *args: torch.Tensor) -> torch.Tensor:
        return F.linear(*args)

    def linear(self, *args: torch.Tensor) -> torch.Tensor:
        return F.linear(*args)

    behind_attention = linear

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1)

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    def attention(self, *args: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in args))


class Quantised(Plain):
    """The same with what backward gets quantised, but for the batch, which the caller holds."""

    def __init__(self, recipe: str) -> None:
        functions = {"gelu": oracle.Gelu, "dropout": oracle.Dropout, "softmax": oracle.Softmax}
        functions |= {"layer_norm": oracle.LayerNorm, "attention": oracle.Attention}
        for name, function in functions.items():
            setattr(self, name, lambda *args, apply=function.apply: apply(*args, recipe))
        self.linear = lambda x, weight, bias: oracle.Linear.apply(x, weight, bias, recipe)
        # the attention's result is kept by the attention, too, whose rows are those of one head
        self.behind_attention = lambda x, weight, bias: oracle.Linear.apply(x, weight, bias, recipe, 32)


class Bert(nn.Module):
    """A block with an attention of each kind, and products that take one input three times."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.to(dtype)

    def forward(self, x: torch.Tensor, ops: Any) -> torch.Tensor:
        def linear(layer: nn.Linear, x: torch.Tensor, call: Any = ops.linear) -> torch.Tensor:
            return call(x, layer.weight, layer.bias)

        x = ops.first(x, self.layers[0].weight, self.layers[0].bias)
        y = ops.layer_norm(x, self.norm.weight, self.norm.bias)
        q, k, v = (linear(self.layers[i], y).view(2, 32, 2, 32) for i in (1, 2, 3))
        attended = ops.attention(q, k, v).transpose(1, 2).reshape(2, 32, 64)
        x = x + ops.dropout(linear(self.layers[4], attended, ops.behind_attention))
        q, k, v = (linear(self.layers[i], y).view(2, 32, 2, 32).transpose(1, 2) for i in (5, 6, 7))
        scores = torch.matmul(q, k.transpose(2, 3)) / 32**0.5
        x = x + torch.matmul(ops.softmax(scores), v).transpose(1, 2).reshape(2, 32, 64)
        return x + linear(self.down, ops.gelu(linear(self.up, x)))


def step(model: Bert, x: torch.Tensor, ops: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    result = model(x, ops)
    result.float().square().mean().backward()
    return [result.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.native_kernels
@oracle.packs
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r22_gradients_are_those_of_quantised_tensors_and_the_result_is_torchs(recipe: str, dtype: torch.dtype) -> None:
    model, x = Bert(dtype), torch.randn(2, 32, 64, dtype=dtype).mul(3)
    exact = step(model, x, Plain())
    expected = step(model, x, Quantised(recipe))
    with hmp.casts(hmp.Policy("packed", saved=OPS, saved_recipe=recipe)):
        found = step(model, x, Plain())
    assert torch.equal(found[0], exact[0])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    rounds_nothing = recipe == "bf16" and dtype is torch.bfloat16
    assert all(torch.equal(*pair) for pair in zip(found, exact, strict=True)) is rounds_nothing
    assert hmp.fallbacks() == {}
