"""The fixture that guards every test is itself tested: it must see each kind of change."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F

from torch_snapshot import residue_on_modules


def _other(input, inplace=False):
    return input


def _rebind_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mul", lambda *args: None)


def _swap_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F.relu, "__code__", _other.__code__)


def _change_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F.relu, "__defaults__", (True,))


def _shadow_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__mul__", torch.Tensor.__mul__)


def _wrap_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Linear, "__init__", types.MethodType(lambda self: None, None.__class__))


def _wrap_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)


def _turn_fast_path_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)


CHANGES = [_rebind_builtin, _swap_code, _change_default, _shadow_inherited, _wrap_init, _wrap_step, _turn_fast_path_off]


@pytest.mark.parametrize("change", CHANGES)
def test_the_guard_sees(change, torch_differences):
    assert torch_differences() == []
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(monkeypatch)
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
