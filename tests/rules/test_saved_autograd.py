"""What autograd does around packed tensors: writes, hooks, checkpoints, compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hmp
from saved_oracle import bytes_of, packs

pytestmark = packs

PACKED = hmp.Policy("packed", saved=frozenset({"linear", "gelu", "relu", "mul", "layer_norm"}))
Tensor = torch.Tensor


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def grads(model: nn.Module, x: Tensor, policy: Any = None, call: Any = None) -> list[Tensor]:
    model.zero_grad()
    with hmp.casts(policy) if policy is not None else torch.enable_grad():
        result = (call or model)(x)
    result.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_r22_after_an_in_place_write_backward_has_forwards_numbers() -> None:
    x = torch.randn(64, 128, requires_grad=True)

    def gradient(write: bool) -> Tensor:
        y = x * 2
        z = F.gelu(y)
        if write:
            y.add_(1)
        return torch.autograd.grad(z.sum(), x)[0]

    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        gradient(True)  # torch has no other copy
    with hmp.casts(PACKED):
        assert torch.equal(gradient(True), gradient(False))


def test_r22_a_write_into_what_is_saved_as_it_is_raises_as_torch_does() -> None:
    batch, weight = torch.randn(64, 128), torch.randn(8, 128, requires_grad=True)
    with hmp.casts(PACKED):
        y = F.linear(batch, weight)
    batch.add_(1)
    with pytest.raises(RuntimeError, match=r"inplace operation: .*linear .* at version 1; expected version 0"):
        y.sum().backward()


@pytest.mark.native_kernels  # computed in float32, the op saves a copy of the weight
def test_r22_a_write_into_a_weight_raises_as_torch_does() -> None:
    model, x = mlp(), torch.randn(64, 64)
    for policy in (PACKED, PACKED.replace(bf16={"linear"})):
        with hmp.casts(policy):
            result = model(x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="which linear saved for backward, is at version"):
            result.sum().backward()
        del result  # the graph holds the weight, which could not be watched


def test_r22_hooks_around_it_see_what_torch_keeps() -> None:
    model, x = mlp(), torch.randn(64, 64)
    exact = grads(model, x)
    seen: list[Tensor] = []

    def hooked(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t):
            return model(x)

    def offloaded(x: Tensor) -> Tensor:
        with save_on_cpu():
            return model(x)

    for call in (hooked, offloaded):
        assert same(grads(model, x, PACKED, call), exact)
    assert {tuple(each.shape) for each in seen} >= {(64, 64)}
    assert {name.partition(":")[0]: count for name, count in hmp.fallbacks().items()} == {"linear": 4, "gelu": 2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_r22_a_checkpoint_recomputes_what_forward_computed(reentrant: bool) -> None:
    model, x = mlp(), torch.randn(64, 64, requires_grad=True)

    def inside(x: Tensor) -> Tensor:
        return checkpoint(model, F.gelu(model(x)), use_reentrant=reentrant)

    exact, found = grads(model, x, None, inside), grads(model, x, PACKED, inside)
    assert all((a - b).norm() < 0.05 * b.norm() for a, b in zip(found, exact, strict=True))
    assert not same(found, exact)  # what is outside of the checkpoint is packed


def test_r22_float64_and_statistics_stay_and_so_does_what_is_small() -> None:
    x = torch.randn(64, 128, dtype=torch.float64)

    def gradient(policy: Any) -> Tensor:
        y = x.clone().requires_grad_()
        with hmp.casts(policy) if policy else torch.enable_grad():
            z = F.gelu(y * 2) + F.gelu(y[:30].float() * 2).sum()
        return torch.autograd.grad(z.sum(), y)[0]

    assert torch.equal(gradient(PACKED), gradient(None))
    norm, x = nn.LayerNorm(64), torch.randn(1024, 64, requires_grad=True)
    with hmp.casts(PACKED):
        kept, _ = bytes_of(lambda: norm(x * 2))
    # a byte a number and one for each row, and two statistics of each row as they are
    assert kept == 1024 * 64 * 65 // 64 + 2 * 1024 * 4


@pytest.mark.slow
def test_r22_compiled_and_exported_code_keeps_what_the_compiler_keeps(fresh_compiler: None) -> None:
    model, x = mlp(), torch.randn(64, 64)
    exact = grads(model, x)
    with hmp.convert(policy=PACKED):
        assert same(grads(model, x, None, torch.compile(model, backend="eager")), exact)
        assert "torch.compile" in str(hmp.fallbacks())
        torch.export.export(model, (x,), strict=True)
        exported = torch.export.export(model, (x,), strict=False).module()
        assert torch.equal(exported(x), model(x))
