"""Ways to write a tensor's memory on whatever device: functions that take the tensor and a number, and write new values by it.

A writer may take an alias and drop it. memory_writers.py has those that need the CPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thread_kit import in_thread

Writer = Callable[[torch.Tensor, float], Any]


def _set_alias(tensor: torch.Tensor, value: float) -> None:
    torch.empty(0, device=tensor.device).set_(tensor.detach()).fill_(value)


def _set_alias_of_storage(tensor: torch.Tensor, value: float) -> None:
    alias = torch.empty(0, device=tensor.device)
    alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    alias.fill_(value)


def _preserving(tensor: torch.Tensor, value: float) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor), torch.no_grad():
        tensor.fill_(value)


def by_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Writer:
    def write(tensor: torch.Tensor, value: float) -> None:
        had = tensor.grad
        if not tensor.requires_grad:
            tensor = torch.nn.Parameter(tensor)  # over the same memory
        tensor.grad = torch.full_like(tensor, value)
        kind([tensor], lr=0.5, **options).step()
        tensor.grad = had

    return write


def _loaded(tensor: torch.Tensor, value: float) -> None:
    module = torch.nn.Module()
    module.register_buffer("w", tensor.detach())
    module.load_state_dict({"w": torch.full_like(tensor, value)})


def _setter(tensor: torch.Tensor, value: float) -> None:
    tensor.data = torch.full_like(tensor.data, value)


def _geometry(tensor: torch.Tensor, value: float) -> None:
    """The same memory, read in another order."""
    tensor.data = tensor.data.t()
    tensor.data[0, 1] = value


NO_GRAD = torch.no_grad()
WRITERS: dict[str, Writer] = {
    "fill_": NO_GRAD(lambda t, v: t.fill_(v)),
    "fill_ in inference_mode": torch.inference_mode()(lambda t, v: t.fill_(v)),
    "setitem": NO_GRAD(lambda t, v: t.__setitem__(0, v)),
    "out=": NO_GRAD(lambda t, v: torch.add(torch.full_like(t, v), 1.0, out=t)),
    "foreach": NO_GRAD(lambda t, v: (torch._foreach_zero_([t]), torch._foreach_add_([t], v))),
    "copy_": NO_GRAD(lambda t, v: t.copy_(torch.full_like(t, v))),
    "detach": lambda t, v: t.detach().fill_(v),
    "row of a view": lambda t, v: t.detach()[1].fill_(v),
    "data": lambda t, v: t.data.fill_(v),
    "data of a view": lambda t, v: t.detach().t().data.fill_(v),
    "data =": _setter,
    "geometry": _geometry,
    "set_ alias": _set_alias,
    "set_ to its storage": _set_alias_of_storage,
    "aten.fill_": lambda t, v: torch.ops.aten.fill_.Scalar(t.detach(), v),
    "_unsafe_preserve_version_counter": _preserving,
    "dlpack": lambda t, v: torch.from_dlpack(t.detach()).fill_(v),
    "storage.fill_": lambda t, v: t.untyped_storage().fill_(int(abs(v)) % 64),
    "storage.copy_": lambda t, v: t.untyped_storage().copy_(
        torch.full((t.untyped_storage().nbytes() // 4,), v, device=t.device).untyped_storage()
    ),
    "init": lambda t, v: torch.nn.init.constant_(t, v),
    "load_state_dict": _loaded,
    "data in a thread": lambda t, v: in_thread(t.data.fill_, v),
    "SGD": by_optimizer(torch.optim.SGD, foreach=False),
    "SGD fused": by_optimizer(torch.optim.SGD, fused=True),
    "AdamW": by_optimizer(torch.optim.AdamW, foreach=False),
    "AdamW fused": by_optimizer(torch.optim.AdamW, fused=True),
}
