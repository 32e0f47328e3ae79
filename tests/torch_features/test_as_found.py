"""What somebody else put in torch's place before hmp came: the rules hold through it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import hmp


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
