"""How a model is spread over the ranks: each mode gives the model to train, its share of a batch, and its full weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hmp

WIDTH, HIDDEN, OUT, ROWS = 64, 192, 16, 8  # each weight is large enough for its casts to be shared


class Net(nn.Module):
    """Two products with a ReLU between, so that plain torch can say with three lines what the model gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def fresh(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


class Spread(NamedTuple):
    """A model on its ranks."""

    model: nn.Module
    accumulates: bool = False  # two micro-batches a step, the first without communication
    shares_batch: bool = True  # each rank sees its rows only


def ddp(net: Net, **options: Any) -> Spread:
    return Spread(nn.parallel.DistributedDataParallel(net, **options))


def ddp_own_hook(net: Net) -> Spread:
    """A hook of the user's that computes: its first half runs in backward, its second in a thread of gloo's."""

    def mean(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        return dist.all_reduce(halved(bucket.buffer()), async_op=True).get_future().then(lambda done: halved(done.value()[0]))

    def halved(tensor: Tensor) -> Tensor:
        assert not hmp.casts_enabled()  # R13
        half = tensor * 0.5
        assert half.dtype is torch.float32
        return half * (4 / dist.get_world_size()) ** 0.5

    spread = ddp(net)
    spread.model.register_comm_hook(None, mean)
    return spread


def _fsdp2(net: Net, **options: Any) -> Spread:
    from torch.distributed.fsdp import fully_shard

    for layer in (net.up, net.down):
        fully_shard(layer, **options)
    fully_shard(net, **options)
    return Spread(net)


def fsdp2_mixed(net: Net) -> Spread:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return _fsdp2(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def tensor_parallel(net: Net) -> Spread:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return Spread(net, shares_batch=False)


def both_in_one_mesh(net: Net, sharding: int) -> Spread:
    """FSDP2 over `sharding` groups, tensor parallel inside each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (sharding, dist.get_world_size() // sharding), mesh_dim_names=("shard", "tensor"))
    parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (net.up, net.down, net):
        fully_shard(layer, mesh=mesh["shard"])
    return Spread(net, shares_batch=sharding > 1)


MODES: dict[str, Callable[[Net], Spread]] = {
    "ddp": ddp,
    "ddp, bucket view": lambda net: ddp(net, gradient_as_bucket_view=True),
    "ddp, static graph": lambda net: ddp(net, static_graph=True),
    "ddp, no_sync": lambda net: ddp(net)._replace(accumulates=True),
    "ddp, own hook": ddp_own_hook,
    "fsdp2": _fsdp2,
    "fsdp2, no_sync": lambda net: _fsdp2(net)._replace(accumulates=True),
    "fsdp2, bf16": fsdp2_mixed,
    "tensor parallel": tensor_parallel,
    "one mesh, sharded": lambda net: both_in_one_mesh(net, dist.get_world_size()),
    "one mesh, tensor parallel": lambda net: both_in_one_mesh(net, 1),
}


def full(tensor: Tensor) -> Tensor:
    """A whole parameter, on every rank, as it is now."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Gradients stay on their rank."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


@hmp.disable_casts()
def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step))
    return x, torch.tanh(x[:, :OUT] + x[:, -OUT:])
