"""What torch builds around modules and functions runs under hmp as under torch.autocast: no error, the same dtypes, the same numbers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune, rnn, stateless

import hmp

pytestmark = [
    pytest.mark.native_kernels,
    pytest.mark.filterwarnings("ignore"),  # deprecated utilities are among them
]


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).reshape(4, 6)


def trained(model: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    out = model(*(args or (x(),)))
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def clipped() -> Any:
    model = linear()
    found = trained(model)
    return [*found, nn.utils.clip_grad_norm_(model.parameters(), 0.5), nn.utils.get_total_norm(p.grad for p in model.parameters())]


def as_vector() -> Any:
    model = linear()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return [vector.detach(), *trained(model)]


def pruned(how: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    def run() -> Any:
        model = linear()
        how(model, "weight", amount=2, **options)
        found = trained(model)
        prune.remove(model, "weight")
        return [*found, model(x()).detach()]

    return run


def fused(bn: nn.Module, layer: nn.Module, fuse: Callable[..., nn.Module], given: torch.Tensor) -> Any:
    return [fuse(layer.eval(), bn.eval())(given).detach()]


def packed() -> Any:
    sequence = rnn.pad_sequence([torch.ones(3, 6), torch.ones(2, 6)])
    out, state = nn.RNN(6, 6)(rnn.pack_padded_sequence(sequence, torch.tensor([3, 2])))
    return [rnn.pad_packed_sequence(out)[0].detach(), state.detach()]


def cached() -> Any:
    model = parametrizations.weight_norm(linear())
    with parametrize.cached():
        return trained(model)


def averaged() -> Any:
    model = linear()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    torch.optim.swa_utils.update_bn([x()], average)
    return [average(x()).detach()]


def ensemble() -> Any:
    models = [linear() for _ in range(2)]
    params, buffers = torch.func.stack_module_state(models)

    def call(given: Any, held: Any, v: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(models[0], (given, held), (v,))

    return [torch.func.vmap(call, (0, 0, None))(params, buffers, x()).detach()]


def squared(w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x(), w).float().square().sum()


W = torch.linspace(-1, 1, 36).reshape(6, 6).sin()


def distributed(wrap: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'store')}", rank=0, world_size=1)
            try:
                found = trained(wrap(nn.Sequential(linear(), nn.ReLU(), linear())))
                return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
            finally:
                dist.destroy_process_group()

    return run


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))


def parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (1,)), plan)


UTILITIES: dict[str, Callable[[], Any]] = {
    "clip_grad_norm_": clipped,
    "parameters_to_vector": as_vector,
    "weight_norm": lambda: trained(nn.utils.weight_norm(linear())),
    "spectral_norm": lambda: trained(nn.utils.spectral_norm(linear())),
    "parametrizations.weight_norm": lambda: trained(parametrizations.weight_norm(linear())),
    "parametrizations.spectral_norm": lambda: trained(parametrizations.spectral_norm(linear())),
    "parametrizations.orthogonal": lambda: trained(parametrizations.orthogonal(linear())),
    "parametrizations.orthogonal by cayley": lambda: trained(parametrizations.orthogonal(linear(), orthogonal_map="cayley")),
    "parametrize.cached": cached,
    "prune.l1_unstructured": pruned(prune.l1_unstructured),
    "prune.ln_structured": pruned(prune.ln_structured, n=2, dim=0),
    "prune.random_unstructured": pruned(prune.random_unstructured),
    "fuse_linear_bn_eval": lambda: fused(nn.BatchNorm1d(6), linear(), nn.utils.fuse_linear_bn_eval, x()),
    "fuse_conv_bn_eval": lambda: fused(nn.BatchNorm2d(3), nn.Conv2d(2, 3, 2), nn.utils.fuse_conv_bn_eval, torch.ones(1, 2, 4, 4)),
    "rnn.pack_padded_sequence": packed,
    "skip_init": lambda: [nn.init.ones_(nn.utils.skip_init(nn.Linear, 2, 2).weight).detach()],
    "stateless.functional_call": lambda: [stateless.functional_call(linear(), {"weight": W}, x()).detach()],
    "swap_tensors": lambda: torch.utils.swap_tensors(a := linear().weight, b := linear().weight) or [a.detach(), b.detach()],
    "AveragedModel": averaged,
    "func.linearize": lambda: [torch.func.linearize(squared, W)[1](W)],
    "func.functionalize": lambda: [torch.func.functionalize(squared)(W)],
    "func.stack_module_state": ensemble,
    "checkpoint_wrapper": lambda: trained(checkpoint_wrapper(linear())),
    "DataParallel": lambda: trained(nn.DataParallel(linear())),
    "DistributedDataParallel": distributed(nn.parallel.DistributedDataParallel),
    "fully_shard": distributed(sharded),
    "parallelize_module": distributed(parallel),
}


# These raise under torch.autocast, which mixes dtypes inside of them. Plain torch is the oracle.
REFUSED = {"parametrizations.orthogonal", "parametrizations.orthogonal by cayley"}
# In a vmap over weights torch.autocast adds the bias in float32 behind the product.
WIDER = {"func.stack_module_state"}


def outcomes(names: list[str], region: Callable[[], contextlib.AbstractContextManager[Any]]) -> dict[str, list[torch.Tensor] | str]:
    found: dict[str, list[torch.Tensor] | str] = {}
    for name in names:
        torch.manual_seed(0)
        with region():
            try:
                found[name] = list(UTILITIES[name]())
            except Exception as error:
                found[name] = f"{name}: {type(error).__name__}: {error}"
    return found


SLOW = ["func.linearize"]  # torch's own, which compiles


@pytest.mark.parametrize("names", [[name for name in UTILITIES if name not in SLOW], pytest.param(SLOW, marks=pytest.mark.slow)])
def test_utilities_of_torchs_run_as_under_autocast(names: list[str]) -> None:
    wanted = outcomes([name for name in names if name in REFUSED], contextlib.nullcontext)
    wanted |= outcomes([name for name in names if name not in REFUSED], lambda: torch.autocast("cpu"))
    found = outcomes(names, lambda: hmp.casts("torch-cpu"))
    with hmp.convert(policy="habana"):
        converted = outcomes(names, contextlib.nullcontext)
    assert not [each for kind in (wanted, found, converted) for each in kind.values() if isinstance(each, str)]
    for name in names:
        assert name in REFUSED | WIDER or [t.dtype for t in found[name]] == [t.dtype for t in wanted[name]], name
        near = 0.1 if name in REFUSED else 0.02
        for one, other in zip(found[name], wanted[name], strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=near, atol=near, msg=lambda said, name=name: f"{name}: {said}")
        assert [t.shape for t in converted[name]] == [t.shape for t in wanted[name]], name
