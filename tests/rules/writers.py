"""Every way that was found to write a tensor's memory: a function that takes the tensor and a number, and writes new values by it.

A writer may take an alias and drop it, or hand the alias back, through which it is written again later.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Writer = Callable[[torch.Tensor, float], Any]


@torch.jit.script
def _scripted_data(tensor: torch.Tensor, value: float) -> None:
    tensor.data.fill_(value)


@torch.jit.script
def _scripted_in_place(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.detach().fill_(value)


def _set_alias(tensor: torch.Tensor, value: float) -> None:
    torch.empty(0).set_(tensor.detach()).fill_(value)


def _set_alias_of_storage(tensor: torch.Tensor, value: float) -> None:
    alias = torch.empty(0)
    alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    alias.fill_(value)


def _map(tensor: torch.Tensor, value: float) -> None:
    other = torch.full_like(tensor, value)
    tensor.detach().map_(other, lambda old, new: new)


def _map2(tensor: torch.Tensor, value: float) -> None:
    other = torch.full_like(tensor, value)
    tensor.detach().map2_(other, other, lambda old, new, newer: new)


def _preserving(tensor: torch.Tensor, value: float) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor), torch.no_grad():
        tensor.fill_(value)


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


def _optimizer(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Writer:
    def write(tensor: torch.Tensor, value: float) -> None:
        had = tensor.grad
        if not tensor.requires_grad:
            tensor = torch.nn.Parameter(tensor)  # over the same memory
        tensor.grad = torch.full_like(tensor, value)
        make([tensor]).step()
        tensor.grad = had

    return write


def _numpy(tensor: torch.Tensor, value: float) -> None:
    tensor.detach().numpy()[...] = value


def _dlpack(tensor: torch.Tensor, value: float) -> None:
    torch.from_dlpack(tensor.detach()).fill_(value)


def _address(tensor: torch.Tensor, value: float) -> None:
    if tensor.is_contiguous():
        numbers = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
        numbers[:] = [value] * tensor.numel()


def _in_thread(writer: Writer) -> Writer:
    def write(tensor: torch.Tensor, value: float) -> None:
        thread = threading.Thread(target=writer, args=(tensor, value))
        thread.start()
        thread.join()

    return write


def _saved_and_loaded(tensor: torch.Tensor, value: float) -> None:
    module = torch.nn.Module()
    module.register_buffer("w", tensor.detach())
    module.load_state_dict({"w": torch.full_like(tensor, value)})


def _storage(write: Callable[[Any, float], Any]) -> Writer:
    return lambda tensor, value: write(tensor.untyped_storage(), value)


def _storage_copy(storage: torch.UntypedStorage, value: float) -> None:
    storage.copy_(torch.full((storage.nbytes() // 4,), value).untyped_storage())


def _setter(tensor: torch.Tensor, value: float) -> None:
    tensor.data = torch.full_like(tensor.data, value)


def _geometry(tensor: torch.Tensor, value: float) -> None:
    """The same memory, read in another order."""
    tensor.data = tensor.data.t()
    tensor.data[0, 1] = value


def _shared(tensor: torch.Tensor, value: float) -> None:
    tensor.share_memory_()
    tensor.data.fill_(value)


WRITERS: dict[str, Writer] = {
    "fill_": torch.no_grad()(lambda t, v: t.fill_(v)),
    "fill_ in inference_mode": torch.inference_mode()(lambda t, v: t.fill_(v)),
    "setitem": torch.no_grad()(lambda t, v: t.__setitem__(0, v)),
    "out=": torch.no_grad()(lambda t, v: torch.add(torch.full_like(t, v), 1.0, out=t)),
    "foreach": torch.no_grad()(lambda t, v: (torch._foreach_zero_([t]), torch._foreach_add_([t], v))),
    "copy_": torch.no_grad()(lambda t, v: t.copy_(torch.full_like(t, v))),
    "detach": lambda t, v: t.detach().fill_(v),
    "view": lambda t, v: t.detach().view_as(t).fill_(v),
    "row of a view": lambda t, v: t.detach()[1].fill_(v),
    "data": lambda t, v: t.data.fill_(v),
    "data of a view": lambda t, v: t.detach().t().data.fill_(v),
    "data =": _setter,
    "geometry": _geometry,
    "C's data": lambda t, v: torch._C.TensorBase.data.__get__(t).fill_(v),
    "apply_": lambda t, v: t.detach().apply_(lambda _: v),
    "map_": _map,
    "map2_": _map2,
    "set_ alias": _set_alias,
    "set_ to its storage": _set_alias_of_storage,
    "aten._fused_sgd_": _fused_sgd,
    "aten._fused_adamw_": _fused_adamw,
    "aten.fill_": lambda t, v: torch.ops.aten.fill_.Scalar(t.detach(), v),
    "scripted .data": _scripted_data,
    "scripted fill_": _scripted_in_place,
    "_unsafe_preserve_version_counter": _preserving,
    "SGD": _optimizer(lambda ps: torch.optim.SGD(ps, lr=0.5)),
    "SGD fused": _optimizer(lambda ps: torch.optim.SGD(ps, lr=0.5, fused=True)),
    "AdamW": _optimizer(lambda ps: torch.optim.AdamW(ps, lr=0.5)),
    "AdamW fused": _optimizer(lambda ps: torch.optim.AdamW(ps, lr=0.5, fused=True)),
    "numpy": _numpy,
    "numpy as out": lambda t, v: np.add(np.float32(v), 1, out=t.detach().numpy(), where=True),
    "dlpack": _dlpack,
    "numpy's dlpack": lambda t, v: torch.from_numpy(np.from_dlpack(t.detach()).view()).fill_(v),
    "data_ptr": _address,
    "storage.fill_": _storage(lambda s, v: s.fill_(int(abs(v)) % 64)),
    "storage[i]": _storage(lambda s, v: s.__setitem__(3, 64 + int(abs(v)) % 64)),
    "storage.copy_": _storage(_storage_copy),
    "typed storage": lambda t, v: t.detach().storage().fill_(v),
    "init": lambda t, v: torch.nn.init.constant_(t, v),
    "load_state_dict": _saved_and_loaded,
    "in a thread": _in_thread(torch.no_grad()(lambda t, v: t.fill_(v))),
    "data in a thread": _in_thread(lambda t, v: t.data.fill_(v)),
    "apply_ in a thread": _in_thread(lambda t, v: t.detach().apply_(lambda _: v)),
    "share_memory_": _shared,
}  # fmt: skip


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
