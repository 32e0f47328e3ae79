"""Whether the memory of a device takes torch's copy-on-write mark as the CPU's does: every kind of write clears it, no read does (R18).

Asked of the device, not of its name: tried on a few small tensors, once for each type of device, when memory of it is first to be marked.
Where kernels write by address, as CUDA's for lists of tensors do, it is tried again with these made to clear the mark (address_writes).
Where a graph of the device was captured, nothing is marked from then on: its replays write by address, which clears no mark.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import torch

from .. import torch_private
from . import address_writes

Tensor = torch.Tensor
Reason = Literal["", "device", "captured graph"]

_copy_on_write = torch_private.copy_on_write
_aten = torch.ops.aten  # no patch is asked: neither a policy nor a report sees these calls

# By type of device: what is wrong with the mark there, "" for nothing.
_found: dict[str, str] = {}
_captured: set[str] = set()
_writes_by_address: set[str] = set()  # the types of devices whose memory takes marks while kernels that write by address clear them


def _alias(x: Tensor) -> Tensor:
    return _aten.set_.source_Tensor(_aten.empty.memory_format([0], device=x.device), x)  # type: ignore[no-any-return]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda x: _aten.fill_.Scalar(x, 2.0),
    "zero_": lambda x: _aten.zero_(x),
    "add_": lambda x: _aten.add_.Tensor(x, x),
    "copy_": lambda x: _aten.copy_(x, _aten.mul.Scalar(x, 3.0)),
    "copy_ from the CPU": lambda x: _aten.copy_(x, torch.ones((2, 3), device="cpu")),
    "out=": lambda x: _aten.exp.out(_aten.mul.Scalar(x, 0.0), out=x),
    "product with out=": lambda x: _aten.mm.out(torch.eye(2, device=x.device), _aten.mul.Scalar(x, 2.0), out=x),
    "index_put_": lambda x: _aten.index_put_(x, [torch.tensor([1], device=x.device)], torch.tensor(5.0, device=x.device)),
    "scatter_": lambda x: _aten.scatter_.value(x, 0, torch.zeros((1, 3), dtype=torch.int64, device=x.device), 5.0),
    "masked_fill_": lambda x: _aten.masked_fill_.Scalar(x, _aten.gt.Scalar(x, 1.0), 5.0),
    "foreach": lambda x: torch_private.foreach_add([x], 1.0),
    "a view": lambda x: _aten.fill_.Scalar(_aten.select.int(_aten.detach(x), 0, 1), 2.0),
    "an alias": lambda x: _aten.mul_.Tensor(_alias(x), x),
}  # fmt: skip
READS: dict[str, Callable[[Tensor], Any]] = {
    "cast": lambda x: _aten.to.dtype(x, torch.bfloat16),
    "product": lambda x: _aten.mm(x, _aten.t(x)),
    "sum": lambda x: _aten.add.Tensor(x, x),
    "reduction": lambda x: _aten.sum(x),
    "clone": lambda x: _aten.clone(x),
    "source of copy_": lambda x: _aten.copy_(_aten.empty_like(x), x),
    "to the CPU": lambda x: _aten.to.device(x, torch.device("cpu"), torch.float32),
    "views": lambda x: (_aten.detach(x), _aten.t(x), _aten.select.int(x, 0, 1)),
}


def refusal(device: torch.device) -> Reason:
    """Return why memory of `device` is not to be marked, "" where it is."""
    if device.type in _captured:
        return "captured graph"
    if what_fails(device):
        return "device"
    if device.type in _writes_by_address:
        address_writes.watch()
    return ""


def what_fails(device: torch.device) -> str:
    """Return what is wrong with marks on memory of this type of device, "" for nothing.

    Names of writes and reads, or an error of torch's.
    """
    found = _found.get(device.type)
    if found is None:
        found = _tried(device)
        if found and _copy_on_write is not None:
            with address_writes.watched():
                if not _tried(device):
                    _writes_by_address.add(device.type)
                    found = ""
        _found[device.type] = found
    return found


def captures(device_type: str) -> bool:
    """To be called when a graph of the device begins to be captured. Whether it is the first."""
    first = device_type not in _captured
    _captured.add(device_type)
    return first


# on Gaudi: memory of "hpu" takes torch's mark as the CPU's does, or the tries below find out that it does not; then no copy is kept.
def _tried(device: torch.device) -> str:
    """Return the result of all tries, made in a thread of their own, where no mode and no context is active."""
    if _copy_on_write is None or device.type == "meta":
        return "this torch has no copy-on-write mark" if _copy_on_write is None else "the meta device has no memory"
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(_result(device, _copy_on_write)))
    thread.start()
    thread.join()
    return results[0]


def _result(device: torch.device, mark: torch_private.CopyOnWrite) -> str:
    with torch.no_grad():
        try:
            kept = [name for name, write in WRITES.items() if not _is_cleared(device, write, mark)]
            cleared = [name for name, read in READS.items() if _is_cleared(device, read, mark)]
        except Exception as error:  # a device refuses in its own way; what it said is kept
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    found = [f"the copy-on-write mark is not cleared by {', '.join(kept)}"] if kept else []
    return "; ".join(found + ([f"the copy-on-write mark is cleared by reads: {', '.join(cleared)}"] if cleared else []))


def _is_cleared(device: torch.device, act: Callable[[Tensor], Any], mark: torch_private.CopyOnWrite) -> bool:
    """Return True if `act` clears the mark. Raise RuntimeError where the memory takes none, or where the result is not the CPU's."""
    of_device, of_cpu = (torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=each) for each in (device, "cpu"))
    mark.lazy_clone(of_device)
    if not mark.is_pending(of_device):
        raise RuntimeError("this memory can't be marked copy-on-write")
    act(of_device)
    act(of_cpu)
    is_marked = mark.is_pending(of_device)
    if not torch.equal(_aten.to.device(of_device, torch.device("cpu"), torch.float32), of_cpu):
        raise RuntimeError("a write to memory marked copy-on-write gives another result than on the CPU")
    return not is_marked
