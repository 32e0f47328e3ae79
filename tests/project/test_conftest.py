"""The fixture that guards every test is itself tested: it must see each kind of change."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F


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


def test_the_guard_sees_each_kind_of_change(monkeypatch, torch_differences):
    assert torch_differences() == []
    for owner, name, value in CHANGES:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert torch_differences() != [], name
    assert torch_differences() == []
