"""Whether a tensor's memory was written since it was marked: torch knows, and nobody has to list who writes.

torch marks memory whose copy it puts off until somebody writes to it (copy-on-write), and clears the mark when somebody asks for write
access: by whatever tensor, view, alias, kernel or thread, with a new version or without. Here the put-off copy dies at once, so nothing
is ever copied or moved, and only the mark is left. It is cleared too early at times (by `data_ptr()`, by pickling), and never too late.

What a mark cannot see is a write whose address was taken before. So one is set only while nobody else can hold an address: the memory is
torch's own and not numpy's, a file's or another process's; no other tensor, capsule or graph holds it, which reference counts tell; no
process group may be receiving into it; and no other thread is inside a call, which the threads' frames tell. Memory that foreign
code writes by an address that it keeps (ctypes, a kernel of one's own) stays unseen.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge

Tensor = torch.Tensor
Refusal = Literal["", "device", "foreign memory", "held elsewhere", "process group", "other threads"]

# torch's own, taken before anything is patched
is_marked: Callable[[Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda tensor: False)
storage_of: Callable[[Tensor], Any] = torch._C.TensorBase.untyped_storage
_lazy_clone: Callable[[Tensor], Tensor] | None = getattr(torch._C._VariableFunctions, "_lazy_clone", None)
_interpret: Any = getattr(torch._C, "_jit_interpret_graph", None)
_modes: Callable[[], int] = torch._C._len_torch_function_stack
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_holders: Callable[[Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
_frames = sys._current_frames
_c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")  # None where torch was built without it
_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)


def mark(tensor: Tensor, *, beside_others: bool = True) -> Refusal:
    """Marks the memory of `tensor`, a dense one: `is_marked` says from now on whether anybody asked for write access to it. "" where it is
    marked, else why it cannot be.

    Beside other Python threads a mark takes 10 microseconds instead of 1; with `beside_others=False` it is refused there.
    """
    if not tensor.is_cpu or _lazy_clone is None or _interpret is None or not _has_gil():
        return "device"  # or a torch, or a Python, that has no such mark
    if not storage_of(tensor).resizable():
        return "foreign memory"  # numpy shares it
    if not _held_by_nobody_else(tensor):
        return "held elsewhere"
    if _c10d is not None and _c10d.GroupMember.WORLD is not None:
        return "process group"  # its threads write what they receive, and do not always hold the tensor
    try:
        if len(_frames()) == 1 and not _modes():
            _lazy_clone(tensor)
        elif not beside_others or not _marked_while_others_wait(tensor):
            return "other threads"
    except RuntimeError:  # memory that is not of torch's allocator: a file's, another process's
        return "foreign memory"
    return ""


# --- who else holds the memory --------------------------------------------------------------------------------------------


def _owners(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return _use_count(storage._cdata) + sys.getrefcount(storage)


_plain = torch.empty(1)
# How torch counts differs between its releases: what is counted where nobody else holds anything.
_SOLE_OWNER, _SOLE_HOLDER = _owners(_plain), _holders(_plain)
_view: Any = _plain.view(1)
_HOLDER_OF_A_BASE = _holders(_view._base)
del _plain, _view


def _held_by_nobody_else(tensor: Tensor) -> bool:
    """Whether the tensor, with the one that it is a view of, is all that holds its memory, and no C++ code holds the tensor.

    A dlpack capsule holds the memory, a collective that is under way the tensor, and so does a graph that saved it.
    """
    base = tensor._base
    if base is not None:
        return _owners(tensor) == _SOLE_OWNER + 1 and _holders(base) == _HOLDER_OF_A_BASE
    if _owners(tensor) != _SOLE_OWNER:
        return False
    if _holders(tensor) == _SOLE_HOLDER:
        return True
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    with torch.inference_mode(False):  # the node that adds up a leaf's gradients lives as long as any graph with it, and holds the leaf
        return get_gradient_edge(tensor) is not None and _holders(tensor) == _SOLE_HOLDER + 1


# --- what other threads are in --------------------------------------------------------------------------------------------

# torch's mark is not made for threads: where one is set while another thread enters a write, the process aborts or hangs. So it is set
# while this thread has the GIL and every other one is in a function that does not write: it waits, in one of these of Python's own, or it
# reads, in one that `reads_only` was told of. Before any of them can write it needs the GIL. What is missing here costs speed alone.
_WAITS = {
    "threading": ("Condition.wait", "Thread.join", "Thread._wait_for_tstate_lock"),
    "concurrent.futures.thread": ("_worker",),
    "selectors": (
        "SelectSelector._select",
        "SelectSelector.select",
        "PollSelector.select",
        "EpollSelector.select",
        "KqueueSelector.select",
    ),
    "multiprocessing.connection": ("Connection._recv", "Connection._send"),
    "multiprocessing.synchronize": ("Condition.wait",),
    "multiprocessing.popen_fork": ("Popen.poll",),
    "socket": ("socket.accept", "SocketIO.readinto"),
    "ssl": ("SSLSocket.read",),
    "subprocess": ("Popen._try_wait",),
    "ipykernel.heartbeat": ("Heartbeat.run",),
}  # fmt: skip
_harmless: set[types.CodeType] = set()
_looked_in: set[str] = set()

# The put-off copy dies inside. This way of running it keeps the GIL, where torch's functions let go of it.
_MARKING = """graph(%tensor : Tensor):
  %copy : Tensor = aten::_lazy_clone(%tensor)
  %marked : bool = prim::Constant[value=1]()
  return (%marked)"""
_code_of = operator.attrgetter("f_code")


@functools.cache
def _marking() -> Any:
    return torch._C.parse_ir(_MARKING)


def reads_only(code: types.CodeType) -> None:
    """Notes that whatever a function with this code calls directly, as long as that is no Python function, writes no tensor."""
    _harmless.add(code)


def _marked_while_others_wait(tensor: Tensor) -> bool:
    """Whether the tensor was marked: only while every other Python thread waits or reads.

    From the look at their frames to the end of the marking no bytecode runs here: it is one chain of C functions, so that no other thread
    gets the GIL in between, and nobody's finalizer runs.
    """
    _look_for_waits()
    marking, collecting = _marking(), gc.isenabled()
    gc.disable()
    try:
        frames = itertools.starmap(_frames, ((),))
        others_wait = map(_harmless.issuperset, map(map, itertools.repeat(_code_of), map(dict.values, frames)))
        return any(map(_interpret, itertools.repeat(marking), zip(itertools.compress((tensor,), others_wait))))
    finally:
        if collecting:
            gc.enable()


def _look_for_waits() -> None:
    """Has `_harmless` hold the code of every function in _WAITS whose module is imported, and of the one that looks."""
    _harmless.add(_marked_while_others_wait.__code__)
    for name in _WAITS.keys() - _looked_in:
        module = sys.modules.get(name)
        if module is not None:
            _looked_in.add(name)
            for path in _WAITS[name]:
                found: Any = module
                for part in path.split("."):
                    found = getattr(found, part, None)
                if isinstance(found, types.FunctionType):
                    _harmless.add(found.__code__)
