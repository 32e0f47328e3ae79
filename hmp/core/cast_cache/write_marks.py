"""Marks on memory that torch clears when somebody may write to it, so that hmp need not list who writes (R18).

The mark is torch's copy-on-write: torch._lazy_clone() marks memory as to be copied before the next write, and torch clears the mark
when anybody asks for write access, through any tensor, view, alias, kernel or thread, whether `_version` grows or not. Here the clone is
freed at once: nothing is ever copied or moved, only the mark remains. Some reads clear it too (`data_ptr()`, pickling), which costs a cast.

A write by an address that was taken before the mark was set does not clear it. So a mark is set only where nobody else can have an address:
the memory is torch's own, not numpy's, a file's or another process's; no other tensor, dlpack capsule or graph holds it (by reference
counts); no process group is initialised; no other thread is inside a call that may write (by the threads' frames). A write by foreign code
that kept an address (ctypes, a custom kernel) is not noticed.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge

from .. import torch_private
from . import mark_proof

Tensor = torch.Tensor
Refusal = Literal["", "device", "captured graph", "foreign memory", "held elsewhere", "process group", "other threads"]

# torch's own, taken before anything is patched
storage_of = torch_private.storage_of
_copy_on_write = torch_private.copy_on_write
is_marked: Callable[[Tensor], bool] = (lambda tensor: False) if _copy_on_write is None else _copy_on_write.is_pending
_modes = torch_private.function_modes
_use_count = torch_private.owners_of_storage
_holders = torch_private.holders_of_tensor
_frames = sys._current_frames
_c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")  # None where torch was built without it
_guards = torch_private.tensor_guards


def cache_entry(tensor: Tensor) -> Any:
    """Return what a cache has attached to the memory of `tensor`, else None.

    Raise NotImplementedError or RuntimeError for a tensor without storage.
    """
    return getattr(storage_of(tensor), "_hmp_cache_entry", None)


def set_cache_entry(tensor: Tensor, entry: object) -> None:
    """Attach `entry` to the memory of `tensor`, instead of an earlier one."""
    storage_of(tensor)._hmp_cache_entry = entry


def view_key(tensor: Tensor, version: int) -> tuple[Any, ...]:
    """Return all that the values of a dense `tensor` depend on besides its memory, and `version`.

    Equal keys on unwritten memory, equal values.
    """
    return tensor.shape, version, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_neg()


def same_view_check(tensor: Tensor) -> Callable[[Tensor], bool]:
    """Return a fast check, one call of Dynamo's guards.

    True only for tensors whose `view_key` equals that of `tensor` now, version and storage offset excepted, which the caller compares.

    It may be False for such a tensor too, in inference mode where `tensor` was given outside of it: then compare the keys.
    """
    return _never if _guards is None else _guards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _never(tensor: Tensor) -> bool:
    return False


def mark(tensor: Tensor, entry: object = None, *, beside_others: bool = True) -> Refusal:
    """Mark the memory of a dense `tensor`: `is_marked` is True from now on until somebody asks for write access to it.

    Return "" where it is marked, else why it cannot be.

    `entry` is attached to the memory, marked or not: memory has one mark, so a new one invalidates the entry of the cache that set it
    before. Where the process has other Python threads, a mark takes 10 microseconds instead of 1, and `beside_others=False` refuses it.
    """
    storage = storage_of(tensor)
    storage._hmp_cache_entry = entry
    storage._hmp_period = storage._hmp_period if hasattr(storage, "_hmp_period") and is_marked(tensor) else object()
    if _copy_on_write is None:
        return "device"  # this torch lacks the mark
    if not tensor.is_cpu and (refusal := mark_proof.refusal(tensor.device)):
        return refusal
    if not storage.resizable():
        return "foreign memory"  # numpy shares it
    # counted in this frame: where Dynamo evaluates frames, it holds one more reference to each argument of a call
    if not _is_only_holder(tensor, _use_count(storage._cdata) + sys.getrefcount(storage)):
        return "held elsewhere"
    if _c10d is not None and _c10d.GroupMember.WORLD is not None:
        return "process group"  # its threads write what they receive, and do not always hold a reference to the tensor
    try:
        if len(_frames()) == 1 and not _modes():
            _copy_on_write.lazy_clone(tensor)
        elif not beside_others or not _marked_while_others_wait(tensor, _copy_on_write.run_graph):
            return "other threads"
    except RuntimeError:  # the memory does not come from torch's allocator: a file's, another process's
        return "foreign memory"
    return ""


def period_of(tensor: Tensor) -> object:
    """Return an object that stays the same until somebody asks for write access to the memory of `tensor`.

    None if the memory is not marked.
    """
    storage = storage_of(tensor)
    return getattr(storage, "_hmp_period", None) if is_marked(tensor) else None


def watched(tensor: Tensor) -> object:
    """Return `period_of(tensor)`, whose memory is marked where it was not; None where it cannot be. An entry of a cache stays as it is."""
    period = period_of(tensor)
    if period is not None:
        return period
    entry = cache_entry(tensor)
    # an entry with a copy of numbers from before would be valid again
    mark(tensor, entry if getattr(entry, "low", None) is None else None)
    return period_of(tensor)


def unmark(storage: Any) -> None:
    """Clear the mark of the memory, if there is one, as a write does."""
    if hasattr(storage, "_hmp_cache_entry") and storage.device.type != "xla":
        storage.data_ptr()


# --- who else holds the memory --------------------------------------------------------------------------------------------


def _counted() -> tuple[int, int, int]:
    """Return the reference counts of a tensor that nobody else holds: of its storage, of the tensor, and of a view's base."""
    plain = torch.empty(1, device="cpu")
    storage = storage_of(plain)
    owners, holders = _use_count(storage._cdata) + sys.getrefcount(storage), _holders(plain)
    view: Any = plain.view(1)
    return owners, holders, _holders(view._base)


def _counted_in_a_thread() -> tuple[int, int, int]:
    """Return the counts from a thread of its own.

    hmp may be imported first inside inference_mode(), where views have no base, or a fake mode.
    """
    found: list[tuple[int, int, int]] = []
    thread = threading.Thread(target=lambda: found.append(_counted()))
    thread.start()
    thread.join()
    return found[0]


_SOLE_OWNER, _SOLE_HOLDER, _HOLDER_OF_A_BASE = _counted_in_a_thread()


def _is_only_holder(tensor: Tensor, owners: int) -> bool:
    """Return True if nothing but the tensor, and its base where it is a view, holds its memory, and no C++ code holds the tensor.

    A dlpack capsule holds the memory; a graph that saved the tensor and a collective that is under way hold the tensor.
    """
    base = tensor._base
    if base is not None:
        return owners == _SOLE_OWNER + 1 and _holders(base) == _HOLDER_OF_A_BASE
    if owners != _SOLE_OWNER:
        return False
    if _holders(tensor) == _SOLE_HOLDER:
        return True
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    with torch.inference_mode(False):  # a leaf's AccumulateGrad node holds the leaf, and lives as long as any graph with it
        return get_gradient_edge(tensor) is not None and _holders(tensor) == _SOLE_HOLDER + 1


# --- what other threads are doing -----------------------------------------------------------------------------------------

# torch's mark is not thread-safe: where one is set while another thread begins a write, the process aborts or hangs. So it is set while
# this thread has the GIL and every other thread is at an instruction that does not write: to write, it needs the GIL first. A thread's
# position is the code object and the instruction of its innermost Python frame. A function that is missing below costs speed, not safety.
_Position = tuple[types.CodeType, int]
_position: Callable[[types.FrameType], _Position] = operator.attrgetter("f_code", "f_lasti")

# Functions of Python's standard library that only wait.
_WAITS = {
    "threading": ("Condition.wait", "Thread.join", "Thread._wait_for_tstate_lock"),
    "concurrent.futures.thread": ("_worker",),
    "multiprocessing.connection": ("Connection._recv",),
    "selectors": ("SelectSelector._select", "_PollLikeSelector.select", "EpollSelector.select"),
    "socket": ("SocketIO.readinto", "socket.accept"),
    "multiprocessing.popen_fork": ("Popen.poll",),
    "subprocess": ("Popen._try_wait",),
}
# Names of functions written in C that only wait: no function of torch's that writes a tensor has one of them.
_WAITING = frozenset(
    """accept acquire get join next_event poll read read1 readinto readline receive recv recv_into recvfrom recvmsg select sigwait sleep
    waitpid zmq_proxy device proxy""".split()
)
_harmless: set[types.CodeType] = set()
_looked_in: set[str] = set()

# Marks and frees the clone inside. Run as a graph it keeps the GIL, which torch's Python functions release.
_MARKING = """graph(%tensor : Tensor):
  %copy : Tensor = aten::_lazy_clone(%tensor)
  %marked : bool = prim::Constant[value=1]()
  return (%marked)"""


def reads_only(code: types.CodeType) -> None:
    """Register `code`, of a function that writes no tensor: neither itself nor the C functions that it calls directly."""
    _harmless.add(code)


@functools.cache
def _marking() -> Any:
    return torch_private.parse_graph(_MARKING)


def _marked_while_others_wait(tensor: Tensor, run_graph: Callable[..., Any]) -> bool:
    """Mark the tensor's memory if every other Python thread is waiting or reading. Return whether it did."""
    positions = _positions_of_threads()
    del positions[threading.get_ident()]
    if not all(map(_is_harmless, positions.values())):
        return False
    # lazily: look again whether all threads are still there, and if so run the graph on the tensor
    allowed = _OWN_POSITIONS.union(positions.values())
    unmoved = map(allowed.issuperset, map(map, itertools.repeat(_position), map(dict.values, itertools.starmap(_frames, ((),)))))
    marked = map(run_graph, itertools.repeat(_marking()), zip(itertools.compress((tensor,), unmoved)))
    collecting = gc.isenabled()
    gc.disable()  # a finalizer would run bytecode
    try:
        return _in_one_go(marked)
    finally:
        if collecting:
            gc.enable()


def _positions_of_threads() -> dict[int, _Position]:
    """Return the position of each Python thread, by its id.

    Frames are not returned: a frame in a variable keeps its local variables alive.
    """
    return {thread: _position(frame) for thread, frame in _frames().items()}


def _in_one_go(steps: Iterable[Any]) -> bool:
    """Return `any(steps)`.

    The steps are iterators and functions written in C: from the second look at the other threads until the mark is set no bytecode runs in
    this thread, so no other thread gets the GIL in between.
    """
    return any(steps)


# This thread's position during `_in_one_go`: any of its instructions, as Python rewrites the code that it runs often.
_OWN_POSITIONS = frozenset((_in_one_go.__code__, at) for at in range(len(_in_one_go.__code__.co_code)))


def _is_harmless(position: _Position) -> bool:
    """Return True if a thread at `position` needs the GIL before it can write a tensor."""
    for name in _WAITS.keys() - _looked_in:
        module = sys.modules.get(name)
        if module is not None:
            _looked_in.add(name)
            _harmless.update(filter(None, (_code_at(module, path) for path in _WAITS[name])))
    return position[0] in _harmless or _waits(position)


def _code_at(owner: Any, path: str) -> types.CodeType | None:
    """Return the code of the function `owner.path`, None where this Python has no such function."""
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return getattr(owner, "__code__", None)


@functools.lru_cache(maxsize=256)
def _waits(position: _Position) -> bool:
    """Return True if the instruction at `position` calls a function whose name is in `_WAITING`: `connection.recv(...)`.

    On Python 3.10, whose instructions have no position in the source, this is False.
    """
    code, at = position
    if sys.version_info < (3, 11):
        return False
    instructions = list(dis.get_instructions(code))
    call = next((i for i in instructions if i.offset == at and i.opname in ("CALL", "PRECALL", "CALL_KW", "CALL_FUNCTION_EX")), None)
    if call is None or call.positions is None:
        return False
    begin = call.positions[0], call.positions[2]
    # the function comes from the last instruction whose source begins where the call's does: in `a.b.recv(c.d)` the load of `recv`, in
    # `a.get(b)(c.d)` the first call
    before = (i for i in instructions if i.offset < at and i.positions and i.positions != call.positions and i.opname != "PUSH_NULL")
    gives = [i for i in before if i.positions and (i.positions[0], i.positions[2]) == begin]
    last = max(gives, key=lambda i: (i.positions[1] or 0, i.positions[3] or 0, i.offset) if i.positions else (0, 0, 0), default=None)
    return last is not None and last.opname.startswith("LOAD") and str(last.argval).lstrip("_") in _WAITING
