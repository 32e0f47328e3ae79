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
from thread_kit import in_threads

pytestmark = packs
Tensor = torch.Tensor
EVERYTHING = hmp.Policy("everything", saved={"*"})


def step(weight: Tensor) -> None:
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def swap(weight: Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # a graph that keeps the weight itself forbids it
        torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros_like(weight)))


def write_through_its_data(weight: Tensor) -> None:
    weight.data.zero_()


def exchange(weight: Tensor) -> None:
    weight.data = weight.data * 0


def write_twice(weight: Tensor) -> None:
    """The memory is watched again when the second forward casts the weight."""
    weight.data.zero_()
    with hmp.casts("saved8"):
        F.linear(torch.ones(64, 256), weight.view(weight.shape[0], -1)[:, :256])
        F.linear(torch.ones(64, weight.shape[-1], requires_grad=True), weight.flatten(0, -2))


WRITES: list[Callable[[Tensor], Any]] = [
    step,
    write_through_its_data,
    lambda weight: weight.detach().numpy().fill(0),
    exchange,
    swap,
    write_twice,
    lambda weight: torch.ops.aten._fused_sgd_([weight], [torch.ones_like(weight)], [], weight_decay=0, momentum=0, lr=1.0, dampening=0,
                                              nesterov=False, maximize=False, is_first_step=True),
    lambda weight: torch.from_dlpack(weight.detach()).fill_(0),
    lambda weight: weight.untyped_storage().fill_(0),
]  # fmt: skip
OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda x, w: F.linear(x, w), (64, 256), (256, 256)),
    "matmul": (lambda x, w: x @ w.t(), (64, 256), (256, 256)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (4, 64, 8, 8), (64, 64, 3, 3)),
}


@pytest.mark.parametrize("number", range(len(WRITES)))
@pytest.mark.parametrize("op", OPS)
def test_r22_a_weight_that_is_written_unseen_is_forwards_or_an_error(op: str, number: int) -> None:
    call, shape, of_weight = OPS[op]

    def gradient(policy: str, write: Callable[[Tensor], Any]) -> Tensor:
        torch.manual_seed(0)
        x, weight = torch.randn(shape, requires_grad=True), nn.Parameter(torch.randn(of_weight))
        with hmp.casts(policy):
            y = call(x * 2, weight)
        write(weight)
        return torch.autograd.grad(y.float().sum(), x)[0]

    exact = gradient("torch-cpu", lambda weight: None)
    try:
        found = gradient("saved8", WRITES[number])
    except RuntimeError as error:
        assert "since" in str(error) or "inplace operation" in str(error)
        return
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_r22_a_weight_that_a_numpy_array_shares_is_kept_and_so_is_one_that_cannot_be_watched() -> None:
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(64, 256, requires_grad=True)
    array = weight.detach().numpy()
    expected = torch.ones(64, 256) @ weight.detach().bfloat16().float()
    with hmp.casts("saved8"):
        y = F.linear(x * 1.0, weight)
    array.fill(0)
    found = torch.autograd.grad(y.float().sum(), x)[0]
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_r22_what_was_packed_is_not_found_again_after_a_write() -> None:
    def gradients(policy: Any, write: Callable[[Tensor], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        leaf = torch.randn(64, 256, requires_grad=True)
        x, found = leaf * 1.0, []
        for _ in range(3):
            with hmp.casts(policy):
                y = torch.square(x)
                F.gelu(torch.ones(8))
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
    with hmp.casts("saved8"):
        y = z.imag * weights[0] + z.conj().imag * weights[1] + torch._neg_view(z.real) * weights[2]
    found = torch.autograd.grad(y.sum(), weights)
    for each, exact in zip(found, (z.imag, -z.imag, -z.real), strict=True):
        assert (each - exact).norm() < 0.05 * exact.norm()


def given(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() * 1.0


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(given(x), x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(given(x.view(512, 32, -1)), 32),
    "batch_norm": lambda x: F.batch_norm(given(x.view(2, 8192, -1)), None, None, training=True),
}


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("name", NORMS)
def test_r22_statistics_are_kept_as_they_are(name: str, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16384, width) * torch.exp(torch.randn(16384, 1))
    exact = NORMS[name](x).grad_fn
    with hmp.casts("saved8"):
        found = NORMS[name](x).grad_fn
    for attribute in ("_saved_result1", "_saved_result2"):
        assert torch.equal(getattr(found, attribute), getattr(exact, attribute))


def test_r22_the_sums_of_an_attention_are_kept_as_they_are() -> None:
    torch.manual_seed(0)
    q = torch.randn(64, 4, 32, 16)
    with hmp.casts(EVERYTHING):
        found = F.scaled_dot_product_attention(*(given(q) for _ in range(3))).grad_fn
    exact = F.scaled_dot_product_attention(*(given(q) for _ in range(3))).grad_fn
    assert torch.equal(found._saved_logsumexp, exact._saved_logsumexp)  # type: ignore[union-attr]


def net(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), w)).square().sum()


MODEL = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
STATE = dict(MODEL.named_parameters())


def loss(state: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(MODEL, state, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "grad": lambda w, x, rows: torch.func.grad(net, argnums=(0, 1))(x, w),
    "grad of a parameter": lambda w, x, rows: torch.func.grad(net, argnums=1)(x, nn.Parameter(w)),
    "vmap of grad": lambda w, x, rows: torch.func.vmap(torch.func.grad(net), in_dims=(0, None))(rows, w),
    "vmap": lambda w, x, rows: torch.func.vmap(net, in_dims=(0, None))(rows, w),
    "jacrev": lambda w, x, rows: torch.func.jacrev(lambda x: x @ w)(x[:2]),
    "jacfwd": lambda w, x, rows: torch.func.jacfwd(lambda x: F.gelu(x @ w))(x[:2]),
    "vjp": lambda w, x, rows: torch.func.vjp(net, x, w)[1](torch.tensor(1.0)),
    "hessian": lambda w, x, rows: torch.func.hessian(lambda x: net(x, w[:4, :4]))(x[:2, :4]),
    "grad of functional_call": lambda w, x, rows: torch.func.grad(loss)(STATE, x),
    "per-sample gradients": lambda w, x, rows: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(STATE, rows),
    "linearize": lambda w, x, rows: torch.func.linearize(lambda x: F.gelu(x @ w), x)[1](x),
}


@pytest.mark.parametrize("transform", [pytest.param(name, marks=pytest.mark.slow if name == "linearize" else ()) for name in TRANSFORMS])
def test_r22_inside_a_transform_ops_keep_what_torch_keeps(transform: str) -> None:
    torch.manual_seed(0)
    given = torch.randn(64, 64) / 8, torch.randn(96, 64), torch.randn(3, 96, 64)
    for policy, lists in (("saved8", "autocast"), (EVERYTHING, hmp.Policy("none"))):
        with hmp.casts(lists):
            exact = TRANSFORMS[transform](*given)
        with hmp.casts(policy):
            found = TRANSFORMS[transform](*given)
        leaves = torch.utils._pytree.tree_leaves
        assert all(torch.equal(*pair) for pair in zip(leaves(found), leaves(exact), strict=True))


def test_r22_threads_that_share_weights_train_as_one_does() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 8)), torch.randn(64, 64)

    def gradients() -> list[Tensor]:
        with hmp.casts("saved8"):
            loss = model(x).float().square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected, wrong = gradients(), []

    def run(_: int) -> None:
        for _ in range(10):
            if not all(torch.equal(*pair) for pair in zip(gradients(), expected, strict=True)):
                wrong.append(1)

    in_threads(run, range(4))
    assert not wrong


def test_r22_a_dropout_inside_an_op_comes_back_exactly() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 4, 32, 16) for _ in range(3))
    found = []
    for policy in (hmp.Policy("none"), EVERYTHING.replace(saved=frozenset({"scaled_dot_product_attention"}))):
        leaf = v.clone().requires_grad_()
        torch.manual_seed(1)
        with hmp.casts(policy):
            y = F.scaled_dot_product_attention(q, k * 0, leaf * 1.0, dropout_p=0.1)
        found.append(torch.autograd.grad(y.sum(), leaf)[0])
    # probabilities of 1/32 are exact in float8, and a mask of 0 and 1.11 in bits
    assert torch.allclose(*found, rtol=1e-5)
