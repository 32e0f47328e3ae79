"""User Python in backward and recomputed checkpoints on an accelerator, whose backward runs on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from device_kit import BF16, DEVICE, F32, ON_CPU, all_same, policy, tensor
from hmp.core.active import state
from thread_kit import in_thread, in_threads

pytestmark = pytest.mark.skipif(ON_CPU, reason="only on an accelerator: the CPU's backward runs on the calling thread")
MAIN = threading.get_ident()
OTHER = policy(bf16="softmax", fp32="matmul mul")
# where a forward runs → the dtypes of matmul and of softmax there
EVERYWHERE: dict[str, tuple[Callable[[], AbstractContextManager[Any]], tuple[torch.dtype, torch.dtype]]] = {
    "convert": (hmp.convert, (BF16, F32)),
    "casts": (lambda: hmp.casts("habana"), (BF16, F32)),
    "another policy": (lambda: hmp.casts(OTHER), (F32, BF16)),
    "nowhere": (nullcontext, (F32, F32)),
}


# --- user Python in backward


class Seen:
    """What user Python in backward finds: the thread, whether casts are on, and what a listed op gives."""

    def __init__(self) -> None:
        self.notes: list[tuple[bool, bool, torch.dtype]] = []

    def note(self, *_: object) -> None:
        x = torch.ones(2, 2)
        self.notes.append((threading.get_ident() == MAIN, hmp.casts_enabled(), torch.matmul(x, x).dtype))

    def assert_without_casts(self, times: int) -> None:
        assert self.notes == [(False, False, F32)] * times, self.notes


def loss_with_hooks(seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose backward runs user Python in five places, and the leaf."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.note()
            return gradient

    x, w = tensor(2, 3, grad=True), tensor(3, 3, grad=True)
    w.register_post_accumulate_grad_hook(seen.note)
    hidden = Identity.apply(torch.matmul(x, w))
    hidden.register_hook(seen.note)
    hidden.grad_fn.register_prehook(seen.note)
    x.register_hook(seen.note)
    return hidden.float().sum(), x


def test_r13_user_python_in_backward_runs_on_the_devices_thread_without_casts() -> None:
    for where, _ in EVERYWHERE.values():
        with where():
            loss, x = loss_with_hooks(seen := Seen())
            loss.backward()
        seen.assert_without_casts(5)
        assert x.grad.dtype is F32
        hmp.revert()


def test_r13_it_does_so_when_backward_is_called_outside_or_under_other_casts() -> None:
    for around in (nullcontext, lambda: hmp.casts(OTHER), hmp.disable_casts, hmp.convert):
        with hmp.casts("habana"):
            loss, _ = loss_with_hooks(seen := Seen())
        with around():
            loss.backward()
        seen.assert_without_casts(5)
        hmp.revert()


when_told = pytest.mark.skipif(
    "_stash_obj_in_tls" not in torch.autograd.graph._engine_run_backward.__code__.co_names,
    reason="this torch leaves nothing of the thread that called backward() for autograd's threads",
)


@when_told
def test_r13_user_python_in_backward_may_switch_its_callers_casts_on() -> None:
    found = []

    def hook(gradient: torch.Tensor) -> None:
        with hmp.enable_casts():
            found.append((hmp.casts_enabled(), torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype))
        found.append((hmp.casts_enabled(), None))

    x = tensor(2, 2, grad=True)
    x.register_hook(hook)
    with hmp.convert(policy=policy(fp32="relu")), hmp.casts("habana"):
        (x * 1).float().sum().backward()
    assert found == [(True, BF16), (False, None)], found


@when_told
def test_r13_it_may_do_so_after_a_backward_of_its_own() -> None:
    """torch no longer tells the thread, then, where backward was called."""
    found = []

    @torch.enable_grad()
    def hook(gradient: torch.Tensor) -> None:
        tensor(2, 2, grad=True).sum().backward()
        with hmp.enable_casts():
            found.append(torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    for region, want in ((hmp.casts("habana"), BF16), (hmp.casts(policy(bf16="softmax")), F32), (hmp.casts("habana"), BF16)):
        x = tensor(2, 2, grad=True)
        x.register_hook(hook)
        with region:
            (x * 1).sum().backward()
        assert found.pop() is want


def test_r13_it_may_do_so_where_torch_does_not_tell_the_thread_its_callers_context() -> None:
    """torch 2.11 and others."""
    with mock.patch.object(state, "_has_in_thread", return_value=False):
        test_r13_user_python_in_backward_may_switch_its_callers_casts_on()


def test_r13_a_backward_inside_a_hook_leaves_the_thread_without_casts() -> None:
    seen = Seen()

    @torch.enable_grad()
    def nested(gradient: torch.Tensor) -> None:
        inner = tensor(2, 2, grad=True)
        inner.register_hook(seen.note)
        torch.matmul(inner, inner).float().sum().backward()
        seen.note()

    hmp.convert()
    x = tensor(2, 2, grad=True)
    hidden = torch.relu(x)
    hidden.register_hook(nested)
    hidden.register_hook(seen.note)
    x.register_hook(seen.note)
    hidden.float().sum().backward()
    seen.assert_without_casts(4)
    loss, _ = loss_with_hooks(later := Seen())
    loss.backward()
    later.assert_without_casts(5)


def test_r13_a_backward_that_no_python_function_starts_runs_without_casts() -> None:
    hmp.convert()
    for starts in ("C", "Python"):
        loss, _ = loss_with_hooks(seen := Seen())
        if starts == "C":
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        else:
            loss.backward()
        seen.assert_without_casts(5)


# --- recomputed checkpoints


class Block:
    """A block that notes where it runs and the dtypes that it computes in."""

    def __init__(self) -> None:
        self.w, self.x = tensor(3, 3, grad=True), tensor(2, 3, grad=True)
        self.runs: list[tuple[bool, torch.dtype, torch.dtype]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, self.w)
        z = torch.softmax(y, -1)
        self.runs.append((threading.get_ident() == MAIN, y.dtype, z.dtype))
        return y * z

    def gradients(self) -> list[torch.Tensor]:
        found = [self.x.grad, self.w.grad]
        self.x.grad = self.w.grad = None
        return found


checkpoints = pytest.mark.skipif(DEVICE == "xla", reason="torch.utils.checkpoint knows no XLA; on_rules.py tries that of torch_xla")


@checkpoints
def test_r14_a_checkpoint_is_recomputed_on_the_devices_thread_as_its_forward_ran() -> None:
    for name, (where, dtypes) in EVERYWHERE.items():
        for reentrant in (True, False):
            for backward in (
                torch.Tensor.backward,
                hmp.disable_casts(torch.Tensor.backward),
                hmp.casts(OTHER)(torch.Tensor.backward),
                lambda loss: in_thread(loss.backward),
            ):
                block = Block()
                with where():
                    block(block.x).float().sum().backward()
                    expected, _ = block.gradients(), block.runs.clear()
                    backward(checkpoint(block, block.x, use_reentrant=reentrant).float().sum())
                assert block.runs == [(True, *dtypes), (False, *dtypes)], (name, block.runs)
                all_same(block.gradients(), expected, name)
                hmp.revert()


@checkpoints
def test_r14_a_checkpoint_inside_an_applied_model_is_recomputed_as_its_forward_ran() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(block, x, use_reentrant=False)

    block, seen = Block(), Seen()
    block.x.register_hook(seen.note)
    hmp.apply(Model(), "habana")(block.x).float().sum().backward()
    assert block.runs == [(True, BF16, F32), (False, BF16, F32)], block.runs
    seen.assert_without_casts(1)


@checkpoints
def test_r14_threads_with_policies_of_their_own_share_the_devices_thread() -> None:
    blocks = {"habana": Block(), "other": Block()}
    start = threading.Barrier(2)

    def train(name: str) -> None:
        block = blocks[name]
        for _ in range(10):
            with hmp.casts("habana" if name == "habana" else OTHER):
                loss = checkpoint(block, block.x, use_reentrant=False).float().sum()
            start.wait()
            loss.backward()

    in_threads(train, blocks)
    assert blocks["habana"].runs == [(False, BF16, F32)] * 20, blocks["habana"].runs
    assert blocks["other"].runs == [(False, F32, BF16)] * 20, blocks["other"].runs
