"""Every way that was found to write the CPU's memory, those of other devices among them.

A writer may take an alias and drop it, or hand the alias back, through which it is written again later.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import writers
from thread_kit import in_thread
from writers import NO_GRAD, Writer


@torch.jit.script
def _scripted_data(tensor: torch.Tensor, value: float) -> None:
    tensor.data.fill_(value)


@torch.jit.script
def _scripted_in_place(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.detach().fill_(value)


def _map(tensor: torch.Tensor, value: float) -> None:
    other = torch.full_like(tensor, value)
    tensor.detach().map_(other, lambda old, new: new)


def _map2(tensor: torch.Tensor, value: float) -> None:
    other = torch.full_like(tensor, value)
    tensor.detach().map2_(other, other, lambda old, new, newer: new)


def _fused_sgd(tensor: torch.Tensor, value: float) -> None:
    alias, grad = tensor.detach(), torch.full_like(tensor, -abs(value))
    torch.ops.aten._fused_sgd_(
        [alias], [grad], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False, maximize=False, is_first_step=True
    )


def _fused_adamw(tensor: torch.Tensor, value: float) -> None:
    alias, grad = tensor.detach(), torch.full_like(tensor, value)
    zeros = [torch.zeros_like(tensor) for _ in range(2)]
    torch.ops.aten._fused_adamw_(
        [alias], [grad], zeros[:1], zeros[1:], [], [torch.tensor(1.0)],
        lr=0.5, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _numpy(tensor: torch.Tensor, value: float) -> None:
    tensor.detach().numpy()[...] = value


def _address(tensor: torch.Tensor, value: float) -> None:
    if tensor.is_contiguous():
        numbers = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
        numbers[:] = [value] * tensor.numel()


def _shared(tensor: torch.Tensor, value: float) -> None:
    tensor.share_memory_()
    tensor.data.fill_(value)


WRITERS: dict[str, Writer] = writers.WRITERS | {
    "view": lambda t, v: t.detach().view_as(t).fill_(v),
    "C's data": lambda t, v: torch._C.TensorBase.data.__get__(t).fill_(v),
    "apply_": lambda t, v: t.detach().apply_(lambda _: v),
    "map_": _map,
    "map2_": _map2,
    "aten._fused_sgd_": _fused_sgd,
    "aten._fused_adamw_": _fused_adamw,
    "scripted .data": _scripted_data,
    "scripted fill_": _scripted_in_place,
    "numpy": _numpy,
    "numpy as out": lambda t, v: np.add(np.float32(v), 1, out=t.detach().numpy(), where=True),
    "numpy's dlpack": lambda t, v: torch.from_numpy(np.from_dlpack(t.detach()).view()).fill_(v),
    "data_ptr": _address,
    "storage[i]": lambda t, v: t.untyped_storage().__setitem__(3, 64 + int(abs(v)) % 64),
    "typed storage": lambda t, v: t.detach().storage().fill_(v),
    "in a thread": lambda t, v: in_thread(NO_GRAD(t.fill_), v),
    "apply_ in a thread": lambda t, v: in_thread(t.detach().apply_, lambda _: v),
    "share_memory_": _shared,
}


class OneProcess:
    """A process group of this process alone, whose collectives write what they are given, for as long as the `with` lasts."""

    def __enter__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = f"file://{Path(self._folder.name) / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()
        self._folder.cleanup()


def _by_group(collective: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Writer:
    def write(tensor: torch.Tensor, value: float) -> None:
        # both are held until the group is gone: a thread of gloo's that is the last to hold a tensor wants the GIL to drop it, and
        # torch 2.7 waits for that thread with the GIL taken
        alias = tensor.detach()
        values = torch.full_like(alias, value)
        with OneProcess():
            work = collective(dist.group.WORLD, alias, values)
            if hasattr(work, "wait"):
                work.wait()

    return write


def _functional(group: Any, tensor: torch.Tensor, values: torch.Tensor) -> None:
    result = torch.ops._c10d_functional.all_gather_into_tensor_out(values, 1, group.group_name, out=tensor)
    torch.ops._c10d_functional.wait_tensor(result)


# Collectives with one process, which copy what another tensor holds; those that change nothing in one process have tests with two.
COLLECTIVES: dict[str, Writer] = {
    "group.allgather": _by_group(lambda group, t, v: group.allgather([[t]], [v])),
    "group._allgather_base": _by_group(lambda group, t, v: group._allgather_base(t, v)),
    "dist.scatter": _by_group(lambda group, t, v: dist.scatter(t, [v])),
    "dist.gather": _by_group(lambda group, t, v: dist.gather(v, [t])),
    "group.alltoall_base": _by_group(lambda group, t, v: group.alltoall_base(t, v, [], [])),
    "dist.all_gather": _by_group(lambda group, t, v: dist.all_gather([t], v)),
    "dist.all_gather_into_tensor": _by_group(lambda group, t, v: dist.all_gather_into_tensor(t, v)),
    "dist.all_gather, async": _by_group(lambda group, t, v: dist.all_gather([t], v, async_op=True)),
    "_c10d_functional": _by_group(_functional),
}
