"""The fixture that guards every test is itself tested: it must see each kind of change."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F

from torch_snapshot import residue_on_modules


def _other(input, inplace=False):
    return input


CHANGES = [
    (torch, "mul", lambda *args: None),  # a builtin is bound anew
    (F.relu, "__code__", _other.__code__),
    (F.relu, "__defaults__", (True,)),
    (torch.Tensor, "__mul__", torch.Tensor.__mul__),  # what was inherited is shadowed
    (torch.nn.Linear, "__init__", types.MethodType(lambda self: None, None.__class__)),
    (torch.optim.SGD, "step", lambda self: None),
    (torch.backends.mha, "_is_fastpath_enabled", False),
]


@pytest.mark.parametrize(("owner", "name", "value"), CHANGES)
def test_the_guard_sees(owner, name, value, monkeypatch, torch_differences):
    assert torch_differences() == []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert torch_differences() != []
    assert torch_differences() == []


def test_the_guard_sees_what_is_left_on_a_users_module():
    class Users(torch.nn.Module):
        def forward(self, x):
            return x

    assert any("Users" in line for line in residue_on_modules(__file__.rpartition("/")[0]))


def test_the_guard_sees_a_region_that_did_not_end() -> None:
    from conftest import _left_in
    from hmp.context import state

    state.put(state.PROCESS.off)
    assert _left_in() is state.PROCESS.off
    assert _left_in() is None
