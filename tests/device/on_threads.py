"""Backward of an accelerator runs on a thread of its own, which all callers share: whose casts user Python and recomputations find there.

The rest tests/rules asks on the device.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from device_kit import BF16, DEVICE, F32, ON_CPU, policy, tensor
from thread_kit import in_threads

pytestmark = pytest.mark.skipif(ON_CPU, reason="only on an accelerator: the CPU's backward runs on the calling thread")
MAIN = threading.get_ident()
OTHER = policy(bf16="softmax", fp32="matmul mul")


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
    for where in (hmp.convert, lambda: hmp.casts("habana"), lambda: hmp.casts(OTHER), nullcontext):
        with where():
            loss, x = loss_with_hooks(seen := Seen())
            loss.backward()
        seen.assert_without_casts(5)
        assert x.grad.dtype is F32
        hmp.revert()


@pytest.mark.skipif(DEVICE == "xla", reason="torch.utils.checkpoint knows no XLA; on_rules.py tries that of torch_xla")
def test_r14_threads_with_policies_of_their_own_share_the_devices_thread() -> None:
    start, runs = threading.Barrier(2), {"habana": [], "other": []}
    w = tensor(3, 3, grad=True)

    def train(name: str) -> None:
        def block(x: torch.Tensor) -> torch.Tensor:
            y = torch.matmul(x, w)
            z = torch.softmax(y, -1)
            runs[name].append((threading.get_ident(), y.dtype, z.dtype))
            return y * z

        x = tensor(2, 3, grad=True)
        for _ in range(10):
            with hmp.casts("habana" if name == "habana" else OTHER):
                loss = checkpoint(block, x, use_reentrant=False).float().sum()
            start.wait()
            loss.backward()

    in_threads(train, runs)
    assert [dtypes for _, *dtypes in runs["habana"]] == [[BF16, F32]] * 20
    assert [dtypes for _, *dtypes in runs["other"]] == [[F32, BF16]] * 20
    assert len({thread for found in runs.values() for thread, *_ in found[1::2]}) == 1, "they were recomputed on one thread"
