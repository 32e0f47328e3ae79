"""Pickles, copies and torch.save of what holds torch's functions, in every order of saving, loading, convert and revert."""

from __future__ import annotations

import pickle

import pytest
import torch

import hmp
from trap_kit import policy

LISTS = policy(bf16=["matmul", "mm", "relu", "tanh", "gelu", "linear", "log_softmax"])


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.usefixtures("unpatched")
def test_what_cannot_be_pickled_says_so_and_why():
    """A builtin that the patches could not reach is no longer what its name leads to."""
    held = (torch._C._nn.gelu,)  # a tuple
    hmp.convert(policy=LISTS)
    with pytest.raises(pickle.PicklingError, match=r"gelu.*not the same object|not the same object.*gelu"):
        pickle.dumps(held)
    taken = (torch._C._nn.gelu,)
    assert by_pickle(taken)[0] is torch._C._nn.gelu
    hmp.revert()
    assert by_pickle(held)[0] is held[0]
    assert by_pickle(taken)[0] is torch._C._nn.gelu  # what was taken while torch was patched leads there by its name
