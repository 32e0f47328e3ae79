"""R14: a checkpointed region is recomputed under the state and policy of its forward, wherever backward runs, or it raises."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from thread_kit import in_thread
from trap_kit import policy, same

LOW = torch.bfloat16
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


def _inside_disabled(loss):
    with hmp.disable_casts():
        loss.backward()


def _in_another_thread(loss):
    in_thread(loss.backward)


def _under_another_region(loss):
    with hmp.casts(policy(fp32=["matmul"], bf16=["softmax"])):
        loss.backward()


BACKWARDS = {
    "here": lambda loss: loss.backward(),
    "disabled": _inside_disabled,
    "thread": _in_another_thread,
    "region": _under_another_region,
}


@pytest.mark.sampled(4)
@REENTRANT
@pytest.mark.parametrize("where", BACKWARDS)
@pytest.mark.parametrize("custom", [False, True], ids=["habana", "custom"])
def test_r14_a_checkpoint_of_a_region_is_recomputed_as_its_forward(reentrant, where, custom):
    block = Block()
    with hmp.casts(policy(bf16=["softmax"], fp32=["matmul"]) if custom else "habana"):
        expected = block.expected()
        loss = checkpoint(block, block.x, use_reentrant=reentrant).float().sum()
    BACKWARDS[where](loss)
    block.assert_recomputed_alike(expected)


@REENTRANT
@pytest.mark.parametrize("where", ["on", "thread"])
def test_r14_a_checkpoint_without_casts_is_recomputed_without_casts(reentrant, where):
    block = Block()
    hmp.convert()
    with hmp.disable_casts():
        expected = block.expected()
        loss = checkpoint(block, block.x, use_reentrant=reentrant).sum()
    (_in_another_thread if where == "thread" else torch.Tensor.backward)(loss)
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
def test_r14_two_regions_in_one_graph_keep_their_own_policy(reentrant):
    first, second = Block(), Block()
    with hmp.casts("habana"):
        hidden = checkpoint(first, first.x, use_reentrant=reentrant)
    with hmp.casts(policy(fp32=["matmul"], bf16=["softmax"])):
        checkpoint(second, hidden, use_reentrant=reentrant).float().sum().backward()
    assert first.runs == [(LOW, torch.float32)] * 2
    assert second.runs == [(torch.float32, LOW)] * 2


@REENTRANT
def test_r14_a_checkpoint_inside_an_applied_model(reentrant):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = hmp.apply(Model(), "habana")
    loss = model(model.block.x).float().sum()
    loss.backward()
    assert model.block.runs == [(LOW, torch.float32)] * 2


@REENTRANT
def test_r14_recomputing_after_revert_raises(reentrant):
    block = Block()
    hmp.convert()
    loss = checkpoint(block, block.x, use_reentrant=reentrant).float().sum()
    hmp.revert()
    with pytest.raises(hmp.HmpError):
        loss.backward()


@REENTRANT
def test_r14_recomputing_under_another_process_wide_policy_raises(reentrant):
    block = Block()
    hmp.convert()
    loss = checkpoint(block, block.x, use_reentrant=reentrant).float().sum()
    hmp.convert(policy=policy(bf16=["softmax"], fp32=["matmul"]))
    with pytest.raises(hmp.HmpError):
        loss.backward()


@REENTRANT
def test_r14_recomputing_under_the_same_policy_converted_again_works(reentrant):
    block = Block()
    hmp.convert()
    expected = block.expected()
    loss = checkpoint(block, block.x, use_reentrant=reentrant).float().sum()
    hmp.convert()
    loss.backward()
    block.assert_recomputed_alike(expected)


@REENTRANT
@pytest.mark.parametrize("patched", [False, True])
def test_r14_a_checkpoint_from_before_convert_is_recomputed_without_casts(reentrant, patched):
    block = Block()
    if patched:
        with hmp.casts("habana"):
            pass
    expected = block.expected()
    loss = checkpoint(block, block.x, use_reentrant=reentrant).sum()
    hmp.convert()
    loss.backward()
    block.assert_recomputed_alike(expected)


def test_r14_a_graph_that_is_kept_is_recomputed_alike_each_time():
    block = Block()
    with hmp.casts("habana"):
        expected = block.expected()
        loss = checkpoint(block, block.x, use_reentrant=False).float().sum()
    loss.backward(retain_graph=True)
    for ours, theirs in zip(block.gradients(), expected, strict=True):
        same(ours, theirs)
    with hmp.disable_casts():
        (gradient,) = torch.autograd.grad(loss, block.x, create_graph=True)
    same(gradient, expected[0])
    assert set(block.runs) == {(LOW, torch.float32)}


@REENTRANT
def test_r14_an_exception_in_a_checkpoint_leaves_the_state(reentrant):
    def broken(x):
        raise KeyError

    hmp.convert()
    with hmp.disable_casts():
        with pytest.raises(KeyError):
            checkpoint(broken, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
        assert not hmp.casts_enabled()
    assert hmp.casts_enabled()


def test_r14_a_reentrant_checkpoints_forward_keeps_no_copies_of_weights_that_train():
    # it runs without gradients, as inference does, which keeps them from the first use on
    layer, x = torch.nn.Linear(64, 64), torch.randn(4, 64, requires_grad=True)
    with hmp.casts(policy(bf16=["linear"])):
        checkpoint(layer, x, use_reentrant=True)
        assert hmp.cache_info().entries == 0
        with torch.no_grad():
            layer(x)
        assert hmp.cache_info().entries == 2
