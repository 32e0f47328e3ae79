"""What convert() keeps of torch from one conversion to the next is true of the torch of the next."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F

import hmp

X = torch.ones(2, 2)


def dtypes(*functions) -> list[torch.dtype]:
    with hmp.convert():
        return [function(X).dtype for function in functions]


def test_r16_a_patch_that_came_and_went_between_conversions(monkeypatch) -> None:
    low = [torch.bfloat16]
    assert dtypes(lambda x: torch.relu(x)) == low
    with monkeypatch.context() as patched:
        for owner in (torch, F, torch.Tensor):
            patched.setattr(owner, "relu", lambda x: x.double())
        assert hmp.convert(policy=hmp.Policy(bf16={"mm"})) and torch.relu(X).dtype is torch.float64
        hmp.revert()
    assert dtypes(lambda x: torch.relu(x)) == low


@pytest.mark.slow
def test_r16_what_stood_in_torchs_place_is_not_kept_alive(monkeypatch) -> None:
    class Model:
        pass

    hmp.convert().revert()  # torch's own tables are filled at the first conversion, and keep what they find for good
    for wraps in (lambda f: f, functools.wraps(F.softplus)):
        model = Model()
        reference = weakref.ref(model)
        with monkeypatch.context() as patched:
            patched.setattr(F, "softplus", wraps(lambda x, kept=model: x))
            hmp.convert(policy=hmp.Policy(bf16={"softplus"})).revert()
        del model
        gc.collect()
        assert reference() is None


@pytest.mark.slow
def test_a_users_function_that_is_another_at_the_next_conversion(monkeypatch) -> None:
    users = types.ModuleType("users_functions")
    users.double = lambda x: x * 2
    monkeypatch.setitem(sys.modules, "users_functions", users)
    policy = hmp.Policy(bf16={"users_functions.double"})
    for _ in range(2):
        with hmp.convert(policy=policy):
            assert users.double(X).dtype is torch.bfloat16
        reference = weakref.ref(users.double)
        users.double = lambda x: x + x
        gc.collect()
        assert reference() is None


# --- what somebody else put in torch's place before hmp came: the rules hold through it


def passing_on(original):
    return lambda *args, **kwargs: original(*args, **kwargs)


def test_r5_the_inplace_flag_is_seen_through_a_foreign_wrapper(monkeypatch) -> None:
    monkeypatch.setattr(F, "relu", passing_on(F.relu))
    monkeypatch.setattr(F, "dropout", passing_on(F.dropout))
    with hmp.convert():
        x, y = torch.tensor([-1.0, 2.0]), torch.ones(100)
        F.relu(x, inplace=True)
        F.dropout(y, 0.5, True, True)
        assert F.relu(x).dtype is torch.bfloat16
    assert x.tolist() == [0.0, 2.0]
    assert 0 < (y == 0).sum() < 100


def test_r9_running_statistics_move_through_a_foreign_wrapper(monkeypatch) -> None:
    for name in ("batch_norm", "layer_norm", "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, passing_on(getattr(F, name)))
    with hmp.convert():
        norm = torch.nn.BatchNorm1d(3)
        assert norm(torch.randn(64, 3) + 5).dtype is torch.bfloat16
        assert torch.nn.LayerNorm(3)(torch.randn(2, 3)).dtype is torch.bfloat16
        q, k = torch.randn(1, 1, 2, 4).bfloat16(), torch.randn(1, 1, 2, 4)
        assert F.scaled_dot_product_attention(q, k, k).dtype is torch.bfloat16
    assert norm.running_mean.dtype is torch.float32
    assert (norm.running_mean > 0.3).all()


def test_a_partial_in_torchs_place_is_cast_as_well(monkeypatch) -> None:
    patch = functools.partial(torch.matmul)
    monkeypatch.setattr(torch, "matmul", patch)
    with hmp.convert():
        assert torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert torch.matmul is patch


def test_r16_what_was_looked_up_in_a_patched_torch_does_not_outlive_the_patch(monkeypatch) -> None:
    policy = hmp.Policy(bf16={"relu"})
    with hmp.convert(policy=policy):
        hmp.explain("tanh"), hmp.explain("relu"), hmp.explain("logit", policy="bert")
    hmp.revert()
    with monkeypatch.context() as patched:  # hmp looks at torch while it is not the one that is patched later
        patched.setattr(torch, "tanh", lambda x: x.double())
        hmp.explain("tanh", policy=policy), hmp.Policy(bf16={"tanh"}), hmp.explain("tanh", policy=hmp.Policy(bf16={"tanh"}))
    with hmp.convert(policy=hmp.Policy(bf16={"tanh"})):
        assert torch.tanh(X).dtype is torch.bfloat16
    assert torch.equal(torch.tanh(X), X.tanh()) and torch.tanh(X).dtype is torch.float32
