"""R14: a checkpointed region is recomputed under the state and policy of its forward, or it raises.

Wherever backward runs: tests/training/test_checkpointing_contexts.py asks that of regions, of applied models and of conversions.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from thread_kit import in_thread
from trap_kit import policy, same

OTHER = policy(fp32=["matmul"], bf16=["softmax"])
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Block:
    """A block whose gradient differs when any of its ops is cast differently; it notes the dtypes of every run."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 4, requires_grad=True)
        self.x = torch.randn(4, 4, requires_grad=True)
        self.runs: list[tuple[torch.dtype, ...]] = []

    def __call__(self, x):
        y = torch.matmul(x, self.weight)
        z = torch.softmax(y, -1)
        self.runs.append((y.dtype, z.dtype))
        return torch.sin(y) * z

    def gradients(self):
        found = self.x.grad, self.weight.grad
        self.x.grad = self.weight.grad = None
        return found

    def expected(self):
        self(self.x).float().sum().backward()
        self.runs.clear()
        return self.gradients()

    def assert_recomputed_alike(self, expected) -> None:
        assert len(self.runs) == 2 and self.runs[0] == self.runs[1], self.runs
        for ours, theirs in zip(self.gradients(), expected, strict=True):
            same(ours, theirs)


@REENTRANT
def test_r14_a_checkpoint_without_casts_is_recomputed_without_casts(reentrant):
    hmp.convert()
    for call in (in_thread, lambda backward: backward()):
        block = Block()
        with hmp.disable_casts():
            expected = block.expected()
            loss = checkpoint(block, block.x, use_reentrant=reentrant).sum()
        call(loss.backward)
        block.assert_recomputed_alike(expected)
        assert block.weight.dtype == torch.float32


@REENTRANT
def test_r14_backward_casts_nothing_after_the_recomputation(reentrant):
    block, seen = Block(), []
    block.x.register_hook(lambda grad: seen.append(hmp.casts_enabled()))
    hmp.convert()
    loss = checkpoint(block, block.x, use_reentrant=reentrant).float().sum()
    loss.backward()
    assert seen == [False]
    assert hmp.casts_enabled()


@REENTRANT
def test_r14_recomputing_under_other_process_wide_casts_raises_and_under_the_same_works(reentrant):
    for later in (hmp.revert, lambda: hmp.convert(policy=OTHER), hmp.convert):
        block = Block()
        hmp.convert()
        expected = block.expected()
        loss = checkpoint(block, block.x, use_reentrant=reentrant).float().sum()
        later()
        if later is hmp.convert:
            loss.backward()
            block.assert_recomputed_alike(expected)
        else:
            with pytest.raises(hmp.HmpError):
                loss.backward()


@REENTRANT
def test_r14_a_checkpoint_from_before_convert_is_recomputed_without_casts(reentrant):
    for patched in (False, True):
        block = Block()
        if patched:
            with hmp.casts("habana"):
                pass
        expected = block.expected()
        loss = checkpoint(block, block.x, use_reentrant=reentrant).sum()
        hmp.convert()
        loss.backward()
        block.assert_recomputed_alike(expected)
        hmp.revert()
