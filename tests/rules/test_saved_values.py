"""Backward sees forward's numbers, whatever was written in between, and statistics, negated views and transforms as in torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from saved_oracle import packs

pytestmark = packs
Tensor = torch.Tensor
EVERYTHING = hmp.Policy("everything", saved={"*"})
LOW = hmp.Policy("low", bf16={"linear", "matmul", "conv2d"})
PACKED = LOW.replace(name="packed", saved={"*"}, saved_recipe="int8")


def swap(weight: Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # a graph that keeps the weight itself forbids it
        torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros_like(weight)))


def exchange(weight: Tensor) -> None:
    weight.data = weight.data * 0


def step(weight: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


WRITES: list[Callable[[Tensor], Any]] = [step, exchange, swap, torch.no_grad()(lambda weight: weight.zero_())]
OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], int]] = {
    "linear": (lambda x, w: F.linear(x, w), (64, 64), (64, 64), len(WRITES)),
    "matmul": (lambda x, w: x @ w.t(), (64, 64), (64, 64), 2),
    "conv2d": (lambda x, w: F.conv2d(x, w), (4, 64, 4, 4), (64, 64, 1, 1), 3),
}


@pytest.mark.parametrize("op", OPS)
def test_r22_a_weight_that_is_written_is_forwards_or_an_error(op: str) -> None:
    call, shape, of_weight, writes = OPS[op]

    def gradient(policy: hmp.Policy, write: Callable[[Tensor], Any]) -> Tensor:
        torch.manual_seed(0)
        x, weight = torch.randn(shape, requires_grad=True), nn.Parameter(torch.randn(of_weight))
        with hmp.casts(policy):
            y = call(x * 2, weight)
        write(weight)
        return torch.autograd.grad(y.float().sum(), x)[0]

    exact = gradient(LOW, lambda weight: None)
    for write in WRITES[:writes]:
        try:
            found = gradient(PACKED, write)
        except RuntimeError as error:
            assert "since" in str(error) or "inplace operation" in str(error)
        else:
            assert (found - exact).norm() < 0.02 * exact.norm()


def test_r22_what_was_packed_is_not_found_again_after_a_write() -> None:
    def gradients(policy: Any, write: Callable[[Tensor], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        leaf = torch.randn(64, 256, requires_grad=True)
        x, found = leaf * 1.0, []
        for _ in range(3):
            with hmp.casts(policy):
                y = torch.square(x)
            found.append(torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0])
            write(x)
        return found

    for write in (lambda x: x.data.mul_(3), lambda x: x.detach().numpy().__imul__(3), lambda x: torch.from_dlpack(x.detach()).mul_(3)):
        for found, exact in zip(gradients(EVERYTHING, write), gradients(hmp.Policy("none"), write), strict=True):
            assert (found - exact).norm() < 0.05 * exact.norm()


def test_r22_a_negated_view_is_not_taken_for_the_numbers_of_its_memory() -> None:
    torch.manual_seed(0)
    z = torch.view_as_complex(torch.rand(8192, 2) + 1)
    weights = [torch.ones(8192, requires_grad=True) for _ in range(3)]
    with hmp.casts(PACKED):
        y = z.imag * weights[0] + z.conj().imag * weights[1] + torch._neg_view(z.real) * weights[2]
    found = torch.autograd.grad(y.sum(), weights)
    for each, exact in zip(found, (z.imag, -z.imag, -z.real), strict=True):
        assert (each - exact).norm() < 0.05 * exact.norm()


def given(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() * 1.0


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(given(x), x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(given(x.view(128, 32, -1)), 32),
    "batch_norm": lambda x: F.batch_norm(given(x.view(2, 2048, -1)), None, None, training=True),
}


def test_r22_statistics_are_kept_as_they_are() -> None:
    torch.manual_seed(0)
    for name, norm in NORMS.items():
        for width in (4, 16):
            x = torch.randn(4096, width) * torch.exp(torch.randn(4096, 1))
            exact = norm(x).grad_fn
            with hmp.casts(PACKED):
                found = norm(x).grad_fn
            for attribute in ("_saved_result1", "_saved_result2"):
                assert torch.equal(getattr(found, attribute), getattr(exact, attribute)), name
    q = torch.randn(16, 4, 32, 16)
    exact = F.scaled_dot_product_attention(*(given(q) for _ in range(3))).grad_fn
    with hmp.casts(EVERYTHING):
        found = F.scaled_dot_product_attention(*(given(q) for _ in range(3))).grad_fn
    assert torch.equal(found._saved_logsumexp, exact._saved_logsumexp)  # type: ignore[union-attr]


def net(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), w)).square().sum()


MODEL = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
STATE = dict(MODEL.named_parameters())


def loss(state: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(MODEL, state, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "grad": lambda w, x, rows: torch.func.grad(net, argnums=(0, 1))(x, w),
    "vmap of grad": lambda w, x, rows: torch.func.vmap(torch.func.grad(net), in_dims=(0, None))(rows, w),
    "jacrev": lambda w, x, rows: torch.func.jacrev(lambda x: x @ w)(x[:2]),
    "jacfwd": lambda w, x, rows: torch.func.jacfwd(lambda x: F.gelu(x @ w))(x[:2]),
    "hessian": lambda w, x, rows: torch.func.hessian(lambda x: net(x, w[:4, :4]))(x[:2, :4]),
    "per-sample gradients": lambda w, x, rows: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(STATE, rows),
}


@pytest.mark.parametrize("policy", [(LOW, PACKED), (hmp.Policy("none"), EVERYTHING)], ids=["low", "float32"])
def test_r22_inside_a_transform_ops_keep_what_torch_keeps(policy: tuple[hmp.Policy, hmp.Policy]) -> None:
    torch.manual_seed(0)
    given, leaves = (torch.randn(64, 64) / 8, torch.randn(64, 64), torch.randn(3, 64, 64)), torch.utils._pytree.tree_leaves
    with hmp.casts(policy[0]):
        exact = {name: transform(*given) for name, transform in TRANSFORMS.items()}
    with hmp.casts(policy[1]):
        found = {name: transform(*given) for name, transform in TRANSFORMS.items()}
    for name in TRANSFORMS:
        assert all(torch.equal(*pair) for pair in zip(leaves(found[name]), leaves(exact[name]), strict=True)), name


def test_r22_a_dropout_inside_an_op_comes_back_exactly() -> None:
    torch.manual_seed(0)
    q, v = torch.randint(-4, 5, (2, 4, 4, 32, 16)).float()
    found = []
    for policy in (hmp.Policy("none"), EVERYTHING.replace(saved=frozenset({"scaled_dot_product_attention"}))):
        leaves = [torch.zeros_like(q).requires_grad_(), v.clone().requires_grad_()]
        torch.manual_seed(1)
        with hmp.casts(policy):
            y = F.scaled_dot_product_attention(q, *(leaf * 1.0 for leaf in leaves), dropout_p=0.1)
        found.append(torch.autograd.grad(y.sum(), leaves))
    # small integers and probabilities of 1/32 are exact in float8, and a mask of 0 and 1.11 in bits, by which the gradient of the keys goes
    (of_keys, of_values), (exact_of_keys, exact_of_values) = found
    torch.testing.assert_close(of_keys, exact_of_keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_values, exact_of_values, rtol=1 / 16, atol=1e-5)
