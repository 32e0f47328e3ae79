"""Selective checkpointing, random state, wrappers and libraries' ways to checkpoint: recomputed as the forward ran."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hmp
from low_kernels_kit import products_as_computed
from oracle import BF16, F32
from thread_kit import in_thread
from trap_kit import policy, same

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
LISTS = policy(bf16=["linear", "matmul", "dropout", "relu"], fp32=["softmax"])
OTHER = policy(fp32=["linear", "matmul"], bf16=["softmax", "sin"])


class Block(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.dropout = dropout
        self.runs: list[tuple[torch.dtype, ...]] = []

    def forward(self, x):
        hidden = self.one(x)
        scores = torch.softmax(hidden, -1)
        self.runs.append((hidden.dtype, scores.dtype))
        mixed = torch.matmul(F.dropout(torch.relu(hidden), self.dropout), scores.t())
        return torch.sin(mixed.float() @ self.other(x).float())


def gradients(block, x, run, around=contextlib.nullcontext, thread=False):
    """The result of `run` and the gradients of x and the weights, backward called inside `around`, maybe in another thread."""
    torch.manual_seed(7)
    x = x.detach().requires_grad_()
    result = run(x)

    def backward():
        with around():
            result.float().square().sum().backward()

    torch.manual_seed(99)  # the random state at backward is another than forward's
    in_thread(backward) if thread else backward()
    found = [result.detach(), x.grad, *(p.grad for p in block.parameters())]
    block.zero_grad(set_to_none=True)
    return found


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))
AROUND = {
    "here": contextlib.nullcontext,
    "without casts": hmp.disable_casts,
    "with casts": hmp.enable_casts,
    "in a region": lambda: hmp.casts(OTHER),
}


def cast_explicitly(block, x):
    """`Block` under LISTS, in plain torch: each use of a tensor has a cast of its own."""

    def linear(layer):
        return F.linear(x.to(BF16), layer.weight.to(BF16), layer.bias.to(BF16))

    with hmp.disable_casts():
        hidden = linear(block.one)
        scores = torch.softmax(hidden.to(F32), -1)
        mixed = torch.matmul(F.dropout(hidden.relu(), block.dropout), scores.t().to(BF16)).float()
        return torch.sin(mixed.to(BF16) @ linear(block.other).float().to(BF16))


def assert_as_by_hand(block, run, around="here", thread=False):
    want = gradients(block, X, products_as_computed()(lambda x: cast_explicitly(block, x)))
    block.runs.clear()
    got = gradients(block, X, run, AROUND[around], thread)
    assert len(block.runs) >= 2 and set(block.runs) == {(BF16, F32)}, block.runs
    same(got, want)


def in_scope(scope, run):
    """`run` with its forward under LISTS."""

    def forward(x):
        if scope == "convert":
            hmp.convert(policy=LISTS)  # stays in force until the test ends, backward included
            return run(x)
        with hmp.casts(LISTS):
            return run(x)

    return forward


@pytest.mark.parametrize(("scope", "thread", "reentrant"), [("convert", False, True), ("casts", True, False), ("casts", True, True)])
def test_dropout_and_casts_are_recomputed_as_in_forward(scope, thread, reentrant):
    """preserve_rng_state, on by default: the mask of the forward, drawn again."""
    block = Block(dropout=0.5)
    for around in AROUND:
        assert_as_by_hand(block, in_scope(scope, lambda x: checkpoint(block, x, use_reentrant=reentrant)), around, thread)


@REENTRANT
def test_a_region_inside_a_checkpoint_is_recomputed_as_such(reentrant):
    block, seen = Block(), []

    def mixed(x):
        with hmp.disable_casts():
            wide = block.one(x)
        low = block.other(wide)
        seen.append((wide.dtype, low.dtype))
        return torch.sin(low)

    def by_hand(x):
        wide = F.linear(x, block.one.weight, block.one.bias)
        return torch.sin(F.linear(wide.to(BF16), block.other.weight.to(BF16), block.other.bias.to(BF16)))

    want = gradients(block, X, products_as_computed()(by_hand))
    for around in AROUND.values():
        got = gradients(block, X, in_scope("casts", lambda x: checkpoint(mixed, x, use_reentrant=reentrant)), around)
        same(got, want)
    assert set(seen) == {(F32, BF16)}


@REENTRANT
def test_wrapped_modules_and_sequences(reentrant):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    block = Block()
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapped = checkpoint_wrapper(block, checkpoint_impl=impl)
    assert_as_by_hand(block, in_scope("casts", lambda x: wrapped(x)), "without casts")
    run = in_scope("casts", lambda x: checkpoint_sequential([block, torch.nn.Identity()], 2, x, use_reentrant=reentrant))
    assert_as_by_hand(block, run)
    applied = hmp.apply(checkpoint_wrapper(Block(), checkpoint_impl=impl), LISTS)
    assert_as_by_hand(applied._checkpoint_wrapped_module, lambda x: applied(x), "in a region")


def test_offloaded_activations_are_let_go_of():
    """What a hook takes away is not kept alive by hmp: neither an activation nor its low-precision copy."""
    kept = []
    with hmp.casts(LISTS), saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        x = torch.randn(4, 128, requires_grad=True)
        hidden = torch.sin(x)
        kept.append(weakref.ref(hidden))
        result = F.linear(hidden, torch.randn(128, 128, requires_grad=True)).float().sum()
        del hidden
    assert kept[0]() is None
    result.backward()
    assert x.grad is not None


# --- R14: under the state and policy of its forward, or it raises


@REENTRANT
def test_r14_a_checkpoint_without_casts_is_recomputed_without_casts(reentrant):
    block = Block()
    want = gradients(block, X, block)
    run = hmp.disable_casts(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    hmp.convert(policy=LISTS)
    for thread in (True, False):
        block.runs.clear()
        same(gradients(block, X, run, thread=thread), want)
        assert block.runs == [(F32, F32)] * 2


@REENTRANT
def test_r14_backward_casts_nothing_after_the_recomputation(reentrant):
    x, seen = X.clone().requires_grad_(), []
    x.register_hook(lambda grad: seen.append(hmp.casts_enabled()))
    hmp.convert(policy=LISTS)
    checkpoint(Block(), x, use_reentrant=reentrant).sum().backward()
    assert seen == [False]
    assert hmp.casts_enabled()


@REENTRANT
def test_r14_recomputing_under_other_process_wide_casts_raises_and_under_the_same_works(reentrant):
    for later in (hmp.revert, lambda: hmp.convert(policy=OTHER), lambda: hmp.convert(policy=LISTS)):
        block = Block()
        hmp.convert(policy=LISTS)
        loss = checkpoint(block, X.clone().requires_grad_(), use_reentrant=reentrant).sum()
        later()
        is_same = hmp.is_converted() and hmp.explain("linear").cast == "bf16"
        with contextlib.nullcontext() if is_same else pytest.raises(hmp.HmpError):
            loss.backward()
        assert block.runs == [(BF16, F32)] * (1 + is_same)


@REENTRANT
def test_r14_a_checkpoint_from_before_convert_is_recomputed_without_casts(reentrant):
    hmp.revert()
    for _ in range(2):  # torch is patched the second time
        block = Block()
        want = gradients(block, X, block)
        block.runs.clear()
        got = gradients(
            block, X, lambda x, block=block: checkpoint(block, x, use_reentrant=reentrant), around=lambda: hmp.convert(policy=LISTS)
        )
        same(got, want)
        assert block.runs == [(F32, F32)] * 2
        with hmp.casts(LISTS):
            pass
