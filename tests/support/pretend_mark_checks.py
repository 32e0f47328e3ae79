"""Checks of copy-on-write marks on the memory of the pretend device: pretend_checks.py runs them with its own.

torch._lazy_clone() marks the memory of a tensor and of its clone; the mark stays when the clone is freed.
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


def step(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[Tensor], Any]:
    def write(x: Tensor) -> None:
        x.grad = ones(x)
        kind([x], lr=0.1, **options).step()

    return write


def in_inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        x.add_(1)


def alias(x: Tensor) -> Tensor:
    return torch.empty(0, device=x.device).set_(x.untyped_storage(), 0, (6,))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "relu_": lambda x: x.relu_(),
    "fill_": lambda x: x.fill_(0),
    "zero_": lambda x: x.zero_(),
    "normal_": lambda x: x.normal_(),
    "copy_": lambda x: x.copy_(ones(x)),
    "copy_ from the CPU": lambda x: x.copy_(torch.ones(2, 3)),
    "add out=": lambda x: torch.add(x, 1, out=x),
    "mm out=": lambda x: torch.mm(ones(x, 2, 2), ones(x), out=x),
    ".data.add_": lambda x: x.data.add_(1),
    "add_ to a view": lambda x: x.t()[1:].add_(1),
    "fill_ of an alias": lambda x: alias(x).fill_(1),
    "storage's fill_": lambda x: x.untyped_storage().fill_(0),
    "storage's copy_": lambda x: x.untyped_storage().copy_(ones(x).untyped_storage()),
    "storage's resize_": lambda x: x.untyped_storage().resize_(64),
    "resize_": lambda x: x.resize_(5, 5),
    "foreach_add_": lambda x: torch._foreach_add_([x], 1.0),
    "foreach_copy_": lambda x: torch._foreach_copy_([x], [ones(x)]),
    "index_put_": lambda x: x.index_put_((torch.tensor([0], device=x.device),), torch.tensor(5.0, device=x.device)),
    "masked assignment": lambda x: x.__setitem__(x > 3, 9.0),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 3, dtype=torch.long, device=x.device), 1.0),
    "batch_norm's statistics": lambda x: F.batch_norm(ones(x), x[0], x[1], training=True),
    "inference mode": in_inference_mode,
    "SGD": step(torch.optim.SGD),
    "SGD foreach": step(torch.optim.SGD, foreach=True),
    "SGD fused": step(torch.optim.SGD, fused=True),
    "AdamW": step(torch.optim.AdamW, foreach=False),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    # not a write, but the address is given away
    "data_ptr": lambda x: x.data_ptr(),
}


def keeps(read: Callable[[Tensor], Any]) -> None:
    for device in DEVICES:
        x = marked(device)
        read(x)
        assert is_marked(x) and x.tolist() == [[1, 2, 3], [4, 5, 6]]


def clears(write: Callable[[Tensor], Any]) -> None:
    for device in DEVICES:
        x, host = marked(device), torch.arange(6.0).reshape(2, 3) + 1
        torch.manual_seed(2)
        with torch.no_grad():
            write(x)
        assert not is_marked(x)
        if write is not WRITES["resize_"]:  # which leaves the new elements as they are
            torch.manual_seed(2)
            with torch.no_grad():
                write(host)
            assert torch.allclose(x.cpu(), host)


CHECKS |= {f"a read keeps the mark: {name}": (lambda read=read: keeps(read)) for name, read in READS.items()}
CHECKS |= {f"a write clears the mark: {name}": (lambda write=write: clears(write)) for name, write in WRITES.items()}


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
