"""Rows that differ by factors of a thousand: no scale spans two of them, whatever view an op has of its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import hmp
from saved_oracle import packs, quantised

Tensor = torch.Tensor


def rows(*shape: int, dims: tuple[int, ...] = (0,)) -> Tensor:
    """Normal numbers, scaled along the dimensions by up to a thousand, which need a gradient."""
    scale = torch.ones(shape)
    for dim in dims:
        scale *= torch.logspace(0, 3, shape[dim])[torch.randperm(shape[dim])].view([-1 if at == dim else 1 for at in range(len(shape))])
    return (torch.randn(shape) * scale).requires_grad_()


def normed(x: Tensor, over: Tensor) -> Tensor:
    """The sum of what a layer norm gives, weighted: gradients at small rows are as much larger as these are smaller."""
    return (F.layer_norm(x, x.shape[-1:]) * over).sum()


ROWS = 128


def linear(width: int) -> Callable[[], tuple[Callable[[], Tensor], Tensor]]:
    def made() -> tuple[Callable[[], Tensor], Tensor]:
        x, weight, over = rows(ROWS, width), torch.randn(8, width, requires_grad=True), torch.randn(ROWS, 8)
        return lambda: normed(F.linear(x * 1.0, weight), over), weight

    return made


def conv(dims: tuple[int, ...], layout: torch.memory_format) -> Callable[[], tuple[Callable[[], Tensor], Tensor]]:
    def made() -> tuple[Callable[[], Tensor], Tensor]:
        x = rows(8, 8, 8, 8, dims=dims).contiguous(memory_format=layout)
        weight, over = torch.randn(4, 8, 3, 3, requires_grad=True), torch.randn(8, 8, 8, 4)
        return lambda: normed(F.conv2d(x * 1.0, weight, padding=1).permute(0, 2, 3, 1), over), weight

    return made


def transposed(of_what: str) -> Callable[[], tuple[Callable[[], Tensor], Tensor]]:
    def made() -> tuple[Callable[[], Tensor], Tensor]:
        x, weight, over = rows(ROWS, 32), torch.randn(8, 32, requires_grad=True), torch.randn(ROWS, 8)
        columns = x.t().contiguous()
        return {
            "second factor": lambda: normed((weight @ (x * 1.0).t()).t(), over),
            "second factor, contiguous": lambda: normed((weight @ (columns * 1.0)).t(), over),
            "batches": lambda: normed(torch.bmm((columns * 1.0)[None].mT, weight.t()[None])[0], over),
        }[of_what], weight

    return made


def channels() -> tuple[Callable[[], Tensor], Tensor]:
    x, weight, over = rows(256, 64, dims=(1,)), torch.ones(64, requires_grad=True), torch.randn(256, 64)
    return lambda: (F.batch_norm(x * 1.0, None, None, weight, None, True) * over).sum(), weight


CASES = {
    **{f"linear {width}": linear(width) for width in (131, 256)},
    **{f"conv {dims}": conv(dims, torch.contiguous_format) for dims in ((0,), (1,), (0, 2))},
    **{f"conv {dims}, channels last": conv(dims, torch.channels_last) for dims in ((1,), (3,))},
    **{f"transposed {name}": transposed(name) for name in ("second factor", "second factor, contiguous", "batches")},
    "channels of a batch norm": channels,
}


@packs
@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_r22_a_gradient_is_near_where_rows_differ_by_a_thousand(recipe: str) -> None:
    for name, case in CASES.items():
        torch.manual_seed(0)
        call, leaf = case()
        exact = torch.autograd.grad(call(), leaf)[0]
        with hmp.casts(hmp.Policy("everything", saved={"*"}, saved_recipe=recipe)):
            loss = call()
        found = torch.autograd.grad(loss, leaf)[0]
        assert (found - exact).norm() < 0.05 * exact.norm(), name
        assert not torch.equal(found, exact)  # something was packed


@packs
@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_r22_what_backward_gets_has_the_strides_that_the_op_kept_and_scales_of_its_rows(recipe: str) -> None:
    """Kernels of backward choose their way by the strides of what they get beside their gradient's."""
    x = rows(8, 16, 8, 8, dims=(2, 3)).contiguous(memory_format=torch.channels_last)
    for view in (x, x[:, :8], x.permute(0, 2, 1, 3), x[..., :5], rows(64, 96).t(), rows(64, 96)):
        leaf = view.clone(memory_format=torch.preserve_format).requires_grad_()
        with hmp.casts(hmp.Policy("everything", saved={"*"}, saved_recipe=recipe)):
            kept = F.gelu(leaf * 1.0)
        found = kept.grad_fn._saved_self  # type: ignore[union-attr]  # an attribute that torch's stubs don't have
        assert found.stride() == leaf.stride() and torch.equal(found, quantised(leaf, recipe)) and not torch.equal(found, leaf)
