"""Checks of copy-on-write marks on the memory of the pretend device: pretend_checks.py runs them with its own.

torch._lazy_clone() marks the memory of a tensor and of its clone; the mark stays when the clone is freed. That every write clears it is
what tests/device/on_marks.py asks, which runs on this device too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
CHECKS: dict[str, Callable[[], None]] = {}
DEVICES = ("pretend:0", "pretend:1")
is_marked: Callable[[Tensor], bool] = torch._C._is_cow_tensor


def marked(device: str) -> Tensor:
    x = torch.arange(6.0, device=device).reshape(2, 3) + 1
    clone = torch._lazy_clone(x)
    assert is_marked(x) and is_marked(clone)
    del clone
    assert is_marked(x)
    return x


def ones(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape or x.shape, device=x.device)


READS: dict[str, Callable[[Tensor], Any]] = {
    "cpu": lambda x: x.cpu(),
    "to another device": lambda x: x.to(DEVICES[0] if x.device.index else DEVICES[1]),
    "to bfloat16": lambda x: x.to(torch.bfloat16),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "repr": repr,
    "add": lambda x: x + 1,
    "mm": lambda x: x @ x.t(),
    "linear": lambda x: F.linear(x, x),
    "conv1d": lambda x: F.conv1d(x[None], x[None]),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "batch_norm's statistics in eval": lambda x: F.batch_norm(ones(x), x[0], x[1]),
    "cat": lambda x: torch.cat([x, x]),
    "foreach_norm": lambda x: torch._foreach_norm([x]),
    "clone": lambda x: x.clone(),
    "source of copy_": lambda x: ones(x).copy_(x),
    "views": lambda x: (x.view(-1), x[1:], x.t(), x.detach(), x.data),
    "set_ of another tensor": lambda x: torch.empty(0, device=x.device).set_(x),
    "deepcopy": copy.deepcopy,
    "backward": lambda x: (ones(x).requires_grad_() * x).sum().backward(),
    "lazy_clone": lambda x: torch._lazy_clone(x),
}


def keeps(read: Callable[[Tensor], Any]) -> None:
    for device in DEVICES:
        x = marked(device)
        read(x)
        assert is_marked(x) and x.tolist() == [[1, 2, 3], [4, 5, 6]]


CHECKS |= {f"a read keeps the mark: {name}": (lambda read=read: keeps(read)) for name, read in READS.items()}


def memory_whose_clone_is_gone_is_not_copied_by_a_write() -> None:
    x = torch.ones(1000, device=DEVICES[0])
    address = x.data_ptr()
    torch._lazy_clone(x)
    allocations = torch.pretend.allocations
    before = allocations(0)
    assert is_marked(x)
    x.zero_()
    # cpu_fallback has memory of the CPU only, and fill_ needs none of the device's beside
    assert not is_marked(x) and x.data_ptr() == address and allocations(0) == before


def a_clone_keeps_its_values_when_the_other_is_written() -> None:
    x = torch.ones(10, device=DEVICES[1])
    clone = torch._lazy_clone(x)
    x.add_(1)
    assert not is_marked(x) and is_marked(clone) and (x.sum().item(), clone.sum().item()) == (20.0, 10.0)


for _check in (memory_whose_clone_is_gone_is_not_copied_by_a_write, a_clone_keeps_its_values_when_the_other_is_written):
    CHECKS[_check.__name__] = _check
