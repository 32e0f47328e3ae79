"""R13: hooks on saved tensors, forward mode, backward inside backward, optimizers in backward, threads."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import hmp
from backward_kit import Seen
from oracle import BF16, F32
from thread_kit import in_threads
from trap_kit import policy, same

SEEN = Seen()


# --- code that runs in forward although it belongs to a gradient


def _noting_pack(tensor: torch.Tensor) -> torch.Tensor:
    SEEN.note()
    return tensor * 1


def test_r13_pack_hooks_run_without_casts_as_their_unpack_does() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    w = torch.randn(3, 3, requires_grad=True)
    ops = {
        "exp": lambda: x.exp(),
        "matmul": lambda: torch.matmul(x, w),
        "mul": lambda: x.sin() * w,
        "layer_norm": lambda: F.layer_norm(x, (3,), w[0]),
        "log": lambda: torch.log(x.abs() + 1),
        "sparse": lambda: F.softmax(x, -1),
    }
    with hmp.casts("habana"):
        for name, op in ops.items():
            op().float().sum().backward()
            expected = x.grad
            x.grad = None
            SEEN.notes.clear()
            with torch.autograd.graph.saved_tensors_hooks(_noting_pack, lambda tensor: tensor):
                op().float().sum().backward()
            assert SEEN.notes, name
            SEEN.assert_without_lists(len(SEEN.notes))
            same(x.grad, expected)
            x.grad = None


SQUARED: list[tuple[str, bool]] = []


class Squared(Function):
    """forward, setup_context and jvp are called where the user calls the function: they are the user's forward."""

    @staticmethod
    def forward(x):
        SQUARED.append(("forward", hmp.casts_enabled()))
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        SQUARED.append(("setup_context", hmp.casts_enabled()))
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        SQUARED.append(("backward", hmp.casts_enabled()))
        return 2 * ctx.saved_tensors[0] * gradient

    @staticmethod
    def jvp(ctx, tangent):
        SQUARED.append(("jvp", hmp.casts_enabled()))
        return 2 * ctx.saved_tensors[0] * tangent


def test_r13_a_users_function_in_forward_and_forward_mode_is_cast() -> None:
    x = torch.randn(3, requires_grad=True)
    SQUARED.clear()
    with hmp.casts("habana"):
        y = Squared.apply(x)
        y.float().sum().backward()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones(3))
            primal, tangent = torch.autograd.forward_ad.unpack_dual(Squared.apply(dual))
    assert SQUARED == [
        ("forward", True), ("setup_context", True), ("backward", False), ("forward", True), ("setup_context", True), ("jvp", True),
    ]  # fmt: skip
    assert y.dtype is primal.dtype is tangent.dtype is BF16 and x.grad.dtype is F32


# --- backward inside backward, optimizers in backward, checkpoints in hooks


def test_r13_a_backward_inside_a_hook_restores_the_state_of_the_outer_one() -> None:
    SEEN.notes.clear()

    @torch.enable_grad()
    def nested(gradient: torch.Tensor) -> None:
        inner = torch.randn(2, 2, requires_grad=True)
        with hmp.enable_casts():
            loss = torch.matmul(inner, inner)
            assert loss.dtype is BF16
        inner.register_hook(SEEN.note)
        loss.float().sum().backward()
        SEEN.note()

    x = torch.randn(2, 2, requires_grad=True)
    with hmp.casts("habana"):
        hidden = torch.relu(x)
        hidden.register_hook(nested)
        hidden.register_hook(SEEN.note)
        x.register_hook(SEEN.note)
        hidden.float().sum().backward()
        assert hmp.casts_enabled()
    SEEN.assert_without_lists(4)


def test_r13_a_backward_in_a_hook_in_autograds_own_thread_knows_the_policy_of_the_outer_one() -> None:
    """A context of its own stands for such a thread, which a CPU has none of: torch's context is then the empty one of the inner call."""
    found: list[torch.dtype] = []

    def note(_: torch.Tensor) -> None:
        with hmp.enable_casts():
            found.append(torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    @torch.enable_grad()
    def nested() -> None:
        inner = torch.randn(2, requires_grad=True)
        inner.register_hook(note)
        inner.exp().sum().backward()

    x = torch.randn(2, requires_grad=True)
    x.register_hook(lambda _: contextvars.Context().run(nested))
    with hmp.casts("habana"):
        x.exp().sum().backward()
    assert found == [BF16]


@pytest.mark.parametrize("reentrant", [True, False])
def test_r13_a_checkpoint_inside_a_hook_is_recomputed_as_it_ran_there(reentrant: bool) -> None:
    runs = []

    def block(t: torch.Tensor) -> torch.Tensor:
        runs.append(torch.matmul(t, t).dtype)
        return torch.matmul(t, t).sin()

    @torch.enable_grad()
    def hook(gradient: torch.Tensor) -> None:
        inner = torch.randn(2, 2, requires_grad=True)
        checkpoint(block, inner, use_reentrant=reentrant).sum().backward()
        with hmp.enable_casts():
            loss = checkpoint(block, inner, use_reentrant=reentrant).float().sum()
        loss.backward()

    x = torch.randn(2, 2, requires_grad=True)
    x.register_hook(hook)
    with hmp.casts("habana"):
        x.sum().backward()
    assert runs == [F32, F32, BF16, BF16]


def test_r13_an_optimizer_that_steps_in_backward_takes_the_steps_of_explicit_casts() -> None:
    def trained(model: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def step(p: torch.nn.Parameter) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for number in range(4):
            forward(torch.full((2, 3), 0.1 * number + 0.1)).float().square().sum().backward()
        assert all(p.grad is None and p.dtype is F32 for p in model.parameters())
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(1)
    one = torch.nn.Linear(3, 2)
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(one.state_dict())
    by_hand = trained(one, lambda x: F.linear(x.to(BF16), one.weight.to(BF16), one.bias.to(BF16)))
    with hmp.casts("habana"):
        ours = trained(other, other)
    for a, b in zip(ours, by_hand, strict=True):
        same(a, b)


def test_r13_threads_that_run_backward_at_once_keep_their_own_casts() -> None:
    start, wrong = threading.Barrier(8), []

    def run(number: int) -> None:
        seen, low = Seen(), number % 2
        for _ in range(10):
            start.wait()
            x = torch.randn(3, 3, requires_grad=True)
            with hmp.casts(policy(bf16=["matmul"]) if low else policy(fp32=["matmul"])):
                hidden = torch.matmul(x, x)
                hidden.register_hook(seen.note)
                hidden.float().sum().backward()
                if hidden.dtype is not (BF16 if low else F32) or not hmp.casts_enabled() or x.grad.dtype is not F32:
                    wrong.append(number)
        if seen.notes != [(False, F32, F32, BF16, BF16, F32)] * 10:
            wrong.append((number, seen.notes))

    in_threads(run, range(8))
    assert not wrong
