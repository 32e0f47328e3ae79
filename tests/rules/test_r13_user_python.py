"""R13: user Python that autograd calls runs without lists, wherever backward runs; what torch would refuse there is made to fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import hmp
from backward_kit import Seen
from oracle import BF16, F32
from trap_kit import policy, same

OTHER = policy(fp32=["matmul"], bf16=["softmax", "log"])
SCOPES = {"convert": hmp.convert, "casts": lambda: hmp.casts("habana"), "another policy": lambda: hmp.casts(OTHER)}
AROUND_BACKWARD = (nullcontext, hmp.disable_casts, hmp.enable_casts, lambda: hmp.casts("habana"), lambda: hmp.casts(OTHER))
SEEN = Seen()


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        SEEN.note()
        return gradient


class Once(Identity):
    backward = staticmethod(once_differentiable(Identity.backward))


class WithSetup(Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    vjp = staticmethod(Identity.backward)


def _module(x: torch.Tensor, register: Callable[[torch.nn.Module], Any]) -> torch.Tensor:
    module = torch.nn.Linear(3, 3)
    register(module)
    return module(x)


def _with_hook(tensor: torch.Tensor, register: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    register(tensor)
    return tensor


def _queues_a_callback(gradient: torch.Tensor) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(SEEN.note)


def _unpacking(x: torch.Tensor) -> torch.Tensor:
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        SEEN.note()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        return x.exp()


# how user Python gets into a backward: what is made of a leaf, with one call of SEEN.note in its backward
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Tensor.register_hook": lambda x: _with_hook(torch.relu(x), lambda t: t.register_hook(SEEN.note)),
    "a hook of a leaf": lambda x: torch.relu(_with_hook(x, lambda t: t.register_hook(SEEN.note))),
    "a hook of a cast view": lambda x: _with_hook(x.t(), lambda t: t.register_hook(SEEN.note)),
    "register_post_accumulate_grad_hook": lambda x: torch.relu(_with_hook(x, lambda t: t.register_post_accumulate_grad_hook(SEEN.note))),
    "grad_fn.register_hook": lambda x: _with_hook(torch.relu(x), lambda t: t.grad_fn.register_hook(SEEN.note)),
    "grad_fn.register_prehook": lambda x: _with_hook(torch.relu(x), lambda t: t.grad_fn.register_prehook(SEEN.note)),
    "a module's full backward hook": lambda x: _module(x, lambda m: m.register_full_backward_hook(SEEN.note)),
    "a module's full backward pre-hook": lambda x: _module(x, lambda m: m.register_full_backward_pre_hook(SEEN.note)),
    "register_multi_grad_hook": lambda x: _with_hook(
        torch.relu(x), lambda t: torch.autograd.graph.register_multi_grad_hook((t,), SEEN.note)
    ),
    "queue_callback": lambda x: _with_hook(torch.relu(x), lambda t: t.register_hook(_queues_a_callback)),
    "an unpack hook": _unpacking,
    "Function.backward": Identity.apply,
    "once_differentiable": Once.apply,
    "Function.vjp": WithSetup.apply,
}


@pytest.mark.parametrize("scope", SCOPES)
def test_r13_user_python_in_backward_runs_without_lists(scope: str) -> None:
    for place in PLACES.values():
        for around in AROUND_BACKWARD:
            SEEN.notes.clear()
            x = torch.randn(3, 3, requires_grad=True)
            with SCOPES[scope]():
                loss = place(x).float().sum()
                with around():
                    before = hmp.casts_enabled()
                    loss.backward()
                    assert hmp.casts_enabled() == before
            SEEN.assert_without_lists(1)
            assert x.grad.dtype is F32


def test_r13_it_does_so_in_every_way_to_start_a_backward_and_in_the_backward_of_a_backward() -> None:
    starts: tuple[Callable[[torch.Tensor, torch.Tensor], Any], ...] = (
        lambda loss, x: loss.backward(),
        lambda loss, x: torch.autograd.backward([loss], inputs=[x]),
        lambda loss, x: torch.autograd.grad(loss, x),
        lambda loss, x: torch.autograd.grad(loss, x, create_graph=True),
        lambda loss, x: torch.autograd.grad(loss, x, torch.ones(2), is_grads_batched=True),
    )
    with hmp.casts("habana"):
        for start in starts:
            SEEN.notes.clear()
            x = torch.randn(3, 3, requires_grad=True)
            hidden = torch.relu(x)
            hidden.register_hook(SEEN.note)
            start(hidden.float().sum(), x)
            SEEN.assert_without_lists(1)
        SEEN.notes.clear()
        hidden = Identity.apply(x)
        (gradient,) = torch.autograd.grad((hidden * hidden).float().sum(), x, create_graph=True)
        gradient.register_hook(SEEN.note)
        gradient.sum().backward()
        SEEN.assert_without_lists(2 + 1)  # Identity's twice, and the hook


def test_r13_a_hook_may_switch_casts_on_and_that_ends_with_it_or_with_its_error() -> None:
    seen = []

    def hook(gradient: torch.Tensor) -> None:
        with hmp.enable_casts():
            seen.append((hmp.casts_enabled(), torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype))
        with hmp.casts(policy(bf16=["add"])):
            seen.append((hmp.casts_enabled(), torch.add(torch.ones(2), 1).dtype))
        seen.append((hmp.casts_enabled(), None))

    def fails(gradient: torch.Tensor) -> None:
        seen.append((hmp.casts_enabled(), None))
        raise KeyError

    x = torch.randn(2, requires_grad=True)
    x.register_hook(hook)
    x.register_hook(fails)
    with hmp.casts("habana"):
        with pytest.raises(KeyError):
            x.sum().backward()
        assert hmp.casts_enabled()
    assert not hmp.casts_enabled()
    assert seen == [(True, BF16), (True, BF16), (False, None), (False, None)]


# --- in backward, what torch would refuse is made to fit


class Product(Function):
    """A user's product whose forward is cast and whose backward meets the low gradient with the float32 weight that it saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        Product.seen = gradient.dtype, weight.dtype
        return gradient @ weight.mT, x.mT @ gradient

    seen: tuple[torch.dtype, ...]


def test_r13_a_low_gradient_and_a_float32_weight_meet_in_a_users_backward() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with hmp.casts("habana"):
        Product.apply(x, weight).float().square().sum().backward()
    assert Product.seen == (BF16, F32)
    low = x.detach().to(BF16) @ weight.detach().to(BF16)
    gradient = (2 * low.float()).to(BF16)
    same(x.grad, (gradient @ weight.detach().to(BF16).mT).float())  # R7: the gradient comes first
    same(weight.grad, x.detach().mT @ gradient.float())  # R7: x comes first


def test_r13_in_backward_nothing_else_is_changed() -> None:
    seen = []

    def hook(gradient: torch.Tensor) -> None:
        wide, low = torch.randn(2, 2), torch.randn(2, 2).to(BF16)
        seen.extend(t.dtype for t in (torch.add(low, wide), torch.mul(low, 3), torch.mm(low, low), torch.mm(wide, wide), low.to(F32)))
        seen.append(torch.is_autocast_enabled("cpu"))

    x = torch.randn(2, requires_grad=True)
    x.register_hook(hook)
    with hmp.casts("habana"):
        x.sum().backward()
    assert seen == [F32, BF16, BF16, F32, F32, False]


def test_r13_disable_casts_around_backward_leaves_torch_exactly_torch_in_it() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with hmp.casts("habana"):
        loss = Product.apply(x, weight).float().square().sum()
        with hmp.disable_casts(), pytest.raises(RuntimeError, match="dtype"):
            loss.backward()
