"""DistributedDataParallel and FSDP2 with one process on the device: gradients and weights equal those without, to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hmp
from device_kit import BACKEND, DEVICE, ON_CUDA, Net, Plain, all_same, batch, gradients, lists, loss_of, one_process, parameters

STEPS = 5


def _ddp(net: torch.nn.Module, **options: Any) -> torch.nn.Module:
    return DistributedDataParallel(net, device_ids=[torch.cuda.current_device()] if ON_CUDA else None, **options)


def _train(net: torch.nn.Module, model: torch.nn.Module) -> list[torch.Tensor]:
    """Losses, gradients of accumulated batches, evaluations and weights; `net` has the parameters of `model`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(STEPS):
        silent = model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
        with silent:
            loss_of(model, *batch(10 * step)).backward()
        loss = loss_of(model, *batch(10 * step + 5))
        loss.backward()
        seen += [loss.detach().clone(), *gradients(net)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen += [model(batch(3)[0]).float() for _ in range(2)]
    return seen + parameters(net)


def _compare(wrap: Callable[[torch.nn.Module], torch.nn.Module], what: str) -> None:
    plain = Plain()
    want = _train(plain, plain)
    with hmp.convert(policy=lists()):
        net = Net()
        alone = _train(net, net)
        with one_process():
            net = Net()
            together = _train(net, wrap(net))
    all_same(alone, want, f"without {what}")
    all_same(together, want, what)


def test_ddp_equals_one_process_alone() -> None:
    _compare(_ddp, f"DDP on {BACKEND}")
    _compare(lambda net: _ddp(net, gradient_as_bucket_view=True, bucket_cap_mb=0.01), "small buckets, whose views gradients are")
    print(f"with {BACKEND}")


def test_fsdp2_with_one_process_equals_explicit_casts() -> None:
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        pytest.skip(f"this torch has no FSDP2: {error}")
    plain = Plain()

    def run(net: torch.nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        seen = []
        for step in range(STEPS):
            loss = loss_of(net, *batch(10 * step))
            loss.backward()
            seen.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        full = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
        return seen + [p.detach().clone() for p in full]

    want = run(plain)
    with hmp.convert(policy=lists()), one_process():
        net = Net()
        fully_shard(net, mesh=init_device_mesh(DEVICE, (1,)))
        all_same(run(net), want, "FSDP2")
