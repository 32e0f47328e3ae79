"""Hooks on saved tensors, offloading above all, and checkpoints: gradients are those of explicit casts, and nothing is kept for longer."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import hmp
from oracle import BF16, F32
from trap_kit import policy

LISTS = policy(bf16=["linear", "matmul", "relu", "layer_norm"], fp32=["softmax"])


class Model(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.one, self.other = torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        hidden = self.norm(x)
        return torch.softmax(torch.matmul(torch.relu(self.one(hidden)), self.other(hidden).t()), -1)


def by_hand(model, x):
    hidden = F.layer_norm(x.to(BF16), model.norm.normalized_shape, model.norm.weight, model.norm.bias)
    one, other = (F.linear(hidden, m.weight.to(BF16), m.bias.to(BF16)) for m in (model.one, model.other))
    return torch.softmax(torch.matmul(one.relu(), other.t()).to(F32), -1)


def gradients(model, run, x, around=contextlib.nullcontext):
    x = x.detach().requires_grad_()
    result = run(x)
    with around():
        result.float().square().sum().backward()
    found = [result.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


class OnDisk:
    """Saved tensors lie in files between forward and backward."""

    def __init__(self, folder):
        self.folder, self.count, self.dtypes = folder, 0, []

    def pack(self, tensor):
        self.count += 1
        self.dtypes.append(tensor.dtype)
        path = self.folder / f"{self.count}.pt"
        torch.save(tensor, path)
        return path

    def unpack(self, path):
        return torch.load(path)


@pytest.mark.native_kernels  # computed in float32, products save float32
def test_hooks_see_the_low_precision_that_ops_save(tmp_path):
    model, x = Model(64), torch.randn(64, 64, requires_grad=True)
    stored = OnDisk(tmp_path)
    with hmp.casts(LISTS), saved_tensors_hooks(stored.pack, stored.unpack):
        model(x)
    ours, stored.dtypes = sorted(map(str, stored.dtypes)), []
    with saved_tensors_hooks(stored.pack, stored.unpack):
        by_hand(model, x)
    assert ours == sorted(map(str, stored.dtypes))
    assert ours.count("torch.bfloat16") > ours.count("torch.float32") > 0


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
