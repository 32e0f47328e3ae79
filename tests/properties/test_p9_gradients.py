"""P9, gradients: random graphs over weights that are used once to five times, in whatever way backward is reached, have the gradients of
explicit casts.

Oracle: the same graph in plain torch with the casts written out, one cast for each use. A weight that is used once has equal bits; one that
is used again may be summed in float32 instead, with an error to float64 of at most 1.1 times that of a cast for each use (R21). User Python
in backward sees casts off. Rules R13, R14, R21.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hmp
from low_kernels_kit import processor, products_as_computed
from oracle import BF16, F32
from thread_kit import in_thread

Tensor = torch.Tensor
POLICY = hmp.Policy("graph", bf16={"linear", "matmul", "relu"}, fp32={"softmax", "log"})
OTHER = hmp.Policy("another", bf16={"softmax", "tanh"}, fp32={"linear", "matmul", "mm", "mul"})
N = 64  # a weight is then large enough that products which compute in float32 keep less of it than that (R11)


# What forward or backward may lie in, or what may happen between the two.
FORWARD: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.float().clone()), lambda p: p[1].to(p[0])),
    "disabled hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "a function mode": BaseTorchFunctionMode,  # which changes nothing
    "a default device": lambda: torch.device("cpu"),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}
BACKWARD: dict[str, Callable[[], Any]] = {
    "casts off around backward": hmp.disable_casts,
    "another policy around backward": lambda: hmp.casts(OTHER),
    "reverted before backward": lambda: contextlib.nullcontext(hmp.revert()),
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "checkpoint": {"use_reentrant": False},
    "reentrant checkpoint": {"use_reentrant": True},
    "selective checkpoint": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    },
}
WAYS = (*FORWARD, *BACKWARD, *CHECKPOINTS, "retain_graph", "hooks that compute", "another thread")


@dataclass(frozen=True)
class Layer:
    """One op of the graph: what it does with the node before it and with a weight."""

    op: str
    weight: int


OPS = ["linear", "matmul", "heads", "softmax", "tanh", "add", "log"]
LAYERS = st.lists(st.builds(Layer, st.sampled_from(OPS), st.integers(0, 2)), min_size=1, max_size=6)


def cast_of(op: str, t: Tensor, cast: bool) -> Tensor:
    if not cast:
        return t
    return t.to({"linear": BF16, "matmul": BF16, "softmax": F32, "log": F32}.get(op, t.dtype))


def forward(layers: list[Layer], x: Tensor, weights: list[Tensor], cast: bool) -> Tensor:
    for layer in layers:
        w, op = weights[layer.weight], layer.op
        if op == "linear":
            x = F.linear(cast_of(op, x, cast), cast_of(op, w, cast))
        elif op == "matmul":
            x = cast_of(op, x, cast) @ cast_of(op, w, cast)
        elif op == "heads":  # one activation in three products, of which one has no gradient
            q, k, v = (F.linear(cast_of("linear", x, cast), cast_of("linear", each, cast)) for each in weights)
            x = torch.tanh(q.float() * k.float()) + v.detach()
        elif op == "softmax":
            x = F.softmax(cast_of(op, x, cast), -1)
        elif op == "log":
            x = torch.log(cast_of(op, x, cast).square() + 1) if not cast else torch.log((x.square() + 1).float())
        elif op == "add":
            x = x + w[: len(x)]
        else:
            x = torch.tanh(x)
    return x


def gradients(layers: list[Layer], way: str, cast: bool, dtype: torch.dtype = F32, alias: bool = False) -> tuple[list[Tensor], list[Any]]:
    """The gradients of the input and of the three weights, and what user Python in backward saw."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, N, generator=generator).to(dtype).requires_grad_()
    weights = [torch.nn.Parameter((torch.randn(N, N, generator=generator) * 0.15).to(dtype)) for _ in range(3)]
    if alias:
        weights[1] = torch.nn.Parameter(weights[0].data)  # a parameter over the same memory has a gradient of its own
    seen: list[Any] = []

    def hook(grad: Tensor) -> None:
        seen.append(torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    def run(x: Tensor, *ws: Tensor) -> Tensor:
        return forward(layers, x, list(ws), cast)

    with contextlib.ExitStack() as stack:
        stack.enter_context(FORWARD.get(way, contextlib.nullcontext)())
        call = functools.partial(checkpoint, run, **CHECKPOINTS[way]) if way in CHECKPOINTS else run
        out = call(x, *weights)
    if way == "hooks that compute":
        out.register_hook(hook)
    loss = out.float().square().sum()
    if way == "retain_graph":
        loss.backward(retain_graph=True)
        for t in (x, *weights):
            t.grad = None
    with BACKWARD.get(way, contextlib.nullcontext)():
        in_thread(loss.backward) if way == "another thread" else loss.backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, *weights)], seen


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm())


def uses(layers: list[Layer], number: int) -> int:
    return sum((layer.weight == number and layer.op in ("linear", "matmul", "add")) or layer.op == "heads" for layer in layers)


TWICE = [Layer("linear", 0)] * 5


def in_each_way(test: Callable[..., None]) -> Callable[..., None]:
    """One graph in each of the ways, products computed in float32, whatever else is drawn."""
    for way in WAYS:
        test = example([Layer("linear", 0), Layer("softmax", 0), Layer("matmul", 1)], way, False, "float32")(test)
    return test


@settings(max_examples=settings.default.max_examples + 2)
@in_each_way
@example(TWICE, "plain", False, "")
@example(TWICE, "retain_graph", False, "float32")
@example([Layer("linear", 0), Layer("linear", 0), Layer("linear", 1), Layer("linear", 0)], "plain", True, "")
@example([Layer("tanh", 0), Layer("heads", 0)], "plain", False, "")
@given(layers=LAYERS, way=st.sampled_from(WAYS), alias=st.booleans(), kernels=st.sampled_from(["", "float32"]))
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_p9_graphs_have_the_gradients_of_explicit_casts(layers: list[Layer], way: str, alias: bool, kernels: str) -> None:
    hmp.revert()
    with processor(kernels):
        with products_as_computed():
            wanted, _ = gradients(layers, "plain", True, alias=alias)
        exact, _ = gradients(layers, "plain", False, torch.float64, alias=alias)
        with hmp.casts(POLICY):
            got, seen = gradients(layers, way, False, alias=alias)
    assert set(seen) <= {F32}, "user Python in backward ran with casts"
    again = {n for n in range(3) if uses(layers, n) > 1}
    for number, (one, other, true) in enumerate(zip(got, wanted, exact, strict=True)):
        assert one.dtype is F32
        if number - 1 in again:
            # half a unit in the last place of the largest value is what one rounding of a single sum is worth
            slack = 2**-9 * float(true.abs().max())
            mine, theirs = error(one, true), error(other, true)
            assert mine <= 1.1 * theirs + slack, f"weight {number - 1}: error {mine}, with a cast for each use {theirs}"
        else:
            same = torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
            assert same, f"gradient {number}: {one}, explicit casts give {other}"


def loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w: f(x, w).float().square().sum()


AF = torch.autograd.functional
TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Any]] = {
    "grad": lambda f, x, w: torch.func.grad(loss(f), (0, 1))(x, w),
    "vjp": lambda f, x, w: torch.func.vjp(f, x, w)[1](torch.ones_like(f(x, w))),
    "jvp": lambda f, x, w: torch.func.jvp(f, (x, w), (x, w)),
    "jacrev": lambda f, x, w: torch.func.jacrev(f, (0, 1))(x, w),
    "jacfwd": lambda f, x, w: torch.func.jacfwd(f, (0, 1))(x, w),
    "hessian": lambda f, x, w: torch.func.hessian(loss(f), (0, 1))(x, w),
    "functional.vjp": lambda f, x, w: AF.vjp(f, (x, w), torch.ones_like(f(x, w))),
    "functional.jvp": lambda f, x, w: AF.jvp(f, (x, w), (x, w)),
    "functional.hvp": lambda f, x, w: AF.hvp(loss(f), (x, w), (x, w)),
    "functional.jacobian": lambda f, x, w: AF.jacobian(f, (x, w)),
    "functional.jacobian vectorised": lambda f, x, w: AF.jacobian(f, (x, w), vectorize=True),
    "functional.jacobian forward": lambda f, x, w: AF.jacobian(f, (x, w), vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f, x, w: AF.hessian(loss(f), (x, w)),
    "vmap": lambda f, x, w: torch.func.vmap(f, (0, None))(x[:, None], w),
    "vmap of grad": lambda f, x, w: torch.func.vmap(torch.func.grad(lambda x, w: f(x, w).float().sum()), (0, None))(x[:, None], w),
    "double backward": lambda f, x, w: twice(f, x, w),
    "vmap around": lambda f, x, w: torch.func.vmap(lambda scale: f(x, w).float() * scale)(torch.arange(3.0)),
    "stacked weights": lambda f, x, w: torch.func.vmap(f, (None, 0))(x, torch.stack([w.detach(), -w.detach()])),
    "a batch of gradients": lambda f, x, w: torch.autograd.grad(
        f(leaf := x.clone().requires_grad_(), w).float(), leaf, torch.eye(6).view(6, 2, 3), is_grads_batched=True
    ),
}


def twice(f: Callable[..., Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x, w).float().square().sum(), x, create_graph=True)
    return [first.detach(), *torch.autograd.grad(first.square().sum(), (x, w))]


# the user's function is cast: what torch stacks, splits and reshapes around it is not
JOINS = {"stack", "cat", "split", "reshape", "view", "movedim", "unbind", "diagonal", "unsqueeze", "squeeze", "expand"}
ONCE = st.lists(st.sampled_from(["softmax", "tanh", "log"]), max_size=2)


@settings(max_examples=2 * settings.default.max_examples)
@given(before=ONCE, after=ONCE, product=st.sampled_from(["linear", "matmul"]), name=st.sampled_from(sorted(TRANSFORMS)))
def test_p9_transforms_give_what_they_give_with_explicit_casts(before: list[str], after: list[str], product: str, name: str) -> None:
    layers = [*(Layer(op, 0) for op in before), Layer(product, 0), *(Layer(op, 0) for op in after)]
    generator = torch.Generator().manual_seed(5)
    x, w = torch.randn(2, 3, generator=generator), torch.nn.Parameter(torch.randn(3, 3, generator=generator))

    def result(cast: bool) -> list[Tensor]:
        found = TRANSFORMS[name](lambda x, w: forward(layers, x, [w], cast), x, w)
        return torch.utils._pytree.tree_leaves(found)

    hmp.revert()
    with products_as_computed():
        wanted = result(True)
    with hmp.casts(POLICY.replace(bf16=POLICY.bf16 | JOINS)):
        with hmp.record() as report:
            for _ in range(3):  # there is a copy, which no transform may be given
                forward(layers, x, [w], False).float().sum().backward()
        got = result(False)
        forward(layers, x, [w], False)
    assert sum(row.casts_saved for row in report.rows) > 0, "no cast was saved: this says nothing about copies"
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=0 if name != "jvp" else 1e-2, atol=0 if name != "jvp" else 1e-2)
