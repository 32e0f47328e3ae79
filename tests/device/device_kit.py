"""What the tests of this folder have in common: the device, tensors on it that are compared to the bit, and small networks twice.

The networks are as a user writes them, and with every cast of hmp's written out in plain torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import devices_here
import hmp
from oracle import assert_identical

DEVICE = os.environ.get("HMP_TEST_DEVICE", "cpu")
devices_here.set_up(DEVICE)
ON_CPU, ON_CUDA = DEVICE == "cpu", DEVICE == "cuda"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def on_cuda(reason: str) -> pytest.MarkDecorator:
    """Mark a test of something that is CUDA's own."""
    return pytest.mark.skipif(not ON_CUDA, reason=f"CUDA's own: {reason}")


def synchronize() -> None:
    """Waits for what the device still has to do."""
    if DEVICE == "xla":
        importlib.import_module("torch_xla").sync(wait=True)
    elif not ON_CPU:
        getattr(torch, DEVICE).synchronize()


# What torch.distributed works with on the device, None for nothing.
BACKEND = {"cuda": "nccl", "hpu": "hccl", "cpu": "gloo"}.get(DEVICE)


@contextlib.contextmanager
def one_process(leaving: float = 20.0) -> Iterator[None]:
    """A process group of this process alone. This process ends, with where its threads are, if the group takes more than so many seconds to
    leave: torch 2.7 waits for ever, and keeps Python's lock, where a thread of the group's is the last to hold a tensor."""
    if BACKEND is None:
        pytest.skip(f"torch.distributed has no backend for {DEVICE}")
    if not dist.is_available() or (ON_CUDA and not dist.is_nccl_available()):
        pytest.skip(f"this torch was built without {BACKEND}")
    # on Gaudi: importing habana_frameworks.torch.distributed.hccl gives torch.distributed the backend "hccl".
    if DEVICE == "hpu":
        importlib.import_module("habana_frameworks.torch.distributed.hccl")  # which brings hccl
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(BACKEND, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            faulthandler.dump_traceback_later(leaving, exit=True)  # a thread of C code, which needs no lock
            try:
                synchronize()
                dist.destroy_process_group()
            finally:
                faulthandler.cancel_dump_traceback_later()


def seed(number: int) -> None:
    """The device draws the same random numbers from here on."""
    torch.manual_seed(number)
    if DEVICE == "xla":
        importlib.import_module("torch_xla.core.xla_model").set_rng_state(number, torch.device(DEVICE))


def allocated() -> int:
    """The bytes that CUDA's allocator has given out to what is still alive, the work space of cuBLAS left out."""
    gc.collect()
    synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream, the private one of a graph's capture too
    return int(torch.cuda.memory_allocated())


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = F32, grad: bool = False) -> torch.Tensor:
    """Normal numbers on the device, the same on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(DEVICE, dtype).requires_grad_(grad)


def preset() -> str:
    """The preset with torch.autocast's lists of the device: the pretend device has those of an accelerator."""
    # on Gaudi: hmp.apply() takes the lists of "gaudi", and torch.autocast("hpu") has the same.
    return {"pretend": "torch-cuda", "hpu": "gaudi"}.get(DEVICE, f"torch-{DEVICE}")


def policy(bf16: str = "", fp32: str = "", promote: str = "", dtype: torch.dtype = BF16) -> hmp.Policy:
    """A policy that holds just these names."""
    lists = (frozenset(names.split()) for names in (bf16, fp32, promote))
    return hmp.Policy(**dict(zip(("bf16", "fp32", "promote"), lists, strict=True)), name="device", dtype=dtype)


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Asserts the same device, dtype, shape and bits; NaN equals NaN."""
    assert got.device == want.device, f"{what}: on {got.device}, not {want.device}"
    assert_identical(*(each.detach().cpu() for each in (got, want)), what)  # XLA would compile a program for each shape


def all_same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    """Asserts the same of each pair."""
    assert len(got) == len(want) > 0, (what, len(got), len(want))
    synchronize()  # XLA computes all at once; copied one by one, each would be a program of its own
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        same(one, other, f"{what}, tensor {number}")


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The distance of the two, as a share of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


WIDTH, OUT, ROWS = 256, 64, 32


def lists(dtype: torch.dtype = BF16) -> hmp.Policy:
    """What Plain writes out: linear in the low-precision dtype, the loss in float32; relu and the sum compute in what they are given."""
    return policy(bf16="linear", fp32="mse_loss", dtype=dtype)


class Net(torch.nn.Module):
    """Two linear layers wide enough for their casts to be shared, and a third use of the first one's input."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, device=DEVICE)
        self.second = torch.nn.Linear(WIDTH, OUT, device=DEVICE)
        self.beside = torch.nn.Linear(WIDTH, OUT, device=DEVICE)
        for number, each in enumerate(self.parameters()):
            each.data = tensor(*each.shape, seed=100 * seed + number) / 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + self.beside(x)


class Plain(Net):
    """The same with explicit casts: plain torch."""

    low = BF16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def linear(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
            return F.linear(x.to(self.low), layer.weight.to(self.low), layer.bias.to(self.low))

        return linear(torch.relu(linear(x, self.first)), self.second) + linear(x, self.beside)


class PlainHalf(Plain):
    """In float16."""

    low = torch.float16


def batch(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor(ROWS, WIDTH, seed=seed), tensor(ROWS, OUT, seed=seed + 1)


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Written so that it is the same with hmp and without: the result is cast by hand."""
    return F.mse_loss(net(x).to(F32), y)


def parameters(net: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in net.parameters()]
    assert all(g is not None for g in found), "a parameter has no gradient"
    return [g.detach().clone() for g in found if g is not None]
