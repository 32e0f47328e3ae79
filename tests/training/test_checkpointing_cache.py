"""Checkpoints keep no copies of weights that train: a reentrant one's forward runs without gradients, and is no inference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hmp

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def entries() -> int:
    return hmp.cache_info().entries


@REENTRANT
@pytest.mark.parametrize("width", [8, 128], ids=["small", "of a size that is shared"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_a_checkpoint_keeps_no_copies_of_weights_that_train(reentrant, width, nested):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    x, seen = torch.randn(4, width, requires_grad=True), []

    def block(t):
        hidden = model[0](t)
        seen.append(entries())  # a recomputation stops when it has what backward needs
        return model[2](model[1](hidden))

    def outer(t):
        return checkpoint(block, t, use_reentrant=reentrant)

    hmp.convert(policy="torch-cpu")
    checkpoint(outer if nested else block, x, use_reentrant=reentrant).float().sum().backward()
    assert len(seen) >= 2
    assert {*seen, entries()} == {0}


def test_weights_that_do_not_train_are_kept_in_a_reentrant_checkpoint():
    frozen, trained = torch.nn.Linear(8, 8).requires_grad_(False), torch.nn.Linear(8, 8)
    hmp.convert(policy="torch-cpu")
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(lambda t: trained(frozen(t)), x, use_reentrant=True).float().sum().backward()
    assert entries() == 2, hmp.cache_info()  # the frozen weight and bias


def test_inference_keeps_copies_after_a_checkpoint_and_after_its_error():
    model = torch.nn.Linear(8, 8)

    def broken(t):
        model(t)
        raise KeyError

    hmp.convert(policy="torch-cpu")
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(KeyError):
        checkpoint(broken, x, use_reentrant=True)
    assert entries() == 0
    with torch.no_grad():
        model(x)
    assert entries() == 2


def test_a_reentrant_checkpoint_uses_the_weights_of_the_last_step():
    """Several steps, evaluation between them, the fused kind of optimizer too: as explicit casts give."""

    def run(cast):
        torch.manual_seed(0)
        model = torch.nn.Linear(128, 128)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        x, seen = torch.randn(4, 128, requires_grad=True), []

        def block(t):
            return F.linear(cast(t), cast(model.weight), cast(model.bias))

        for _ in range(3):
            checkpoint(block, x, use_reentrant=True).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(block(x).float())
        return seen

    want = run(lambda t: t.bfloat16())
    hmp.convert(policy="torch-cpu")
    for one, other in zip(run(lambda t: t), want, strict=True):
        assert torch.equal(one, other)
