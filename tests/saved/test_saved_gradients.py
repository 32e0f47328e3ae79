"""Packed numbers: what each format gives back, and gradients, which are to the last bit those of ops that get quantised tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
import saved_oracle as oracle
from hmp.saved import formats
from hmp.saved.formats import FORMATS, pack, unpack

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


INF, NAN = math.inf, math.nan
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [(recipe, dtype) for recipe in FORMATS for dtype in FLOATS if dtype in FORMATS[recipe].takes]


def there_and_back(tensor: torch.Tensor, recipe: str) -> torch.Tensor:
    return unpack(pack(tensor, FORMATS[recipe]))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["cpu", "as elsewhere"])
def test_r22_each_number_comes_back_within_its_formats_error(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if elsewhere:  # the way of devices that would have to be waited for: nothing is asked of the numbers
        monkeypatch.setattr(formats, "_is_usual", lambda flat: False)
    for recipe, dtype in PAIRS:
        x = (torch.randn(300_000) * torch.logspace(-3, 3, 300_000)).to(dtype)  # several pieces, and a rest
        y = there_and_back(x, recipe)
        assert y.dtype is dtype and torch.equal(y[-(300_000 % 128) :], x[-(300_000 % 128) :])
        blocks, error = x.double()[:299_904].view(-1, 128), (x.double() - y.double()).abs()[:299_904].view(-1, 128)
        # the rounding to the tensor's own dtype, which the next power of two may begin
        step = torch.finfo(dtype).eps / 2 * blocks.abs().maximum(y.double().abs()[:299_904].view(-1, 128))
        most = {
            "fp8": (blocks.abs() / 16).maximum(blocks.abs().amax(1, keepdim=True) * 2**-16),
            "bf16": blocks.abs() / 256,
            "int8": (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 509 + step,
        }[recipe]
        assert bool((error <= most).all()), (recipe, dtype)
        assert pack(x, FORMATS[recipe]).nbytes <= {"fp8": 1.045, "bf16": 2.001, "int8": 1.08}[recipe] * 300_000


def test_r22_nan_and_inf_come_back_and_what_is_finite_stays_finite() -> None:
    for recipe, dtype in PAIRS:
        most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
        for special in ([INF, -INF, NAN], [INF] * 128, [NAN] * 128, [most, -most], [most] * 128, [0.0] * 128, [least, -least], [-0.0]):
            x = torch.randn(4096 + 5).to(dtype)
            x[: len(special)] = torch.tensor(special, dtype=dtype)
            y = there_and_back(x, recipe)
            odd = ~x.isfinite()
            assert torch.equal(y[odd].nan_to_num(7), x[odd].nan_to_num(7)) and bool(y[~odd].isfinite().all()), (recipe, special)
            plain = x[128:4096]  # the blocks beside it know nothing of it
            assert bool(((y[128:4096] - plain).abs() <= plain.abs() / 16 + 0.02).all()), (recipe, special)


def test_r22_tiny_numbers_are_numbers() -> None:
    x = torch.randn(8192) * 1e-20
    for recipe in ("fp8", "int8"):
        assert (there_and_back(x, recipe) - x).norm() < 0.03 * x.norm()
