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

Tensor = torch.Tensor
Refusal = Literal["", "device", "foreign memory", "held elsewhere", "process group", "other threads"]

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
_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)


def noted(tensor: Tensor) -> Any:
    """What is noted of the memory of `tensor`, None where nothing is. NotImplementedError or RuntimeError where it has none."""
    return getattr(storage_of(tensor), "_hmp_noted", None)


def note(tensor: Tensor, what: object) -> None:
    """Notes something of the memory of `tensor`, in the place of what was noted before."""
    storage_of(tensor)._hmp_noted = what


def shown(tensor: Tensor, version: int) -> tuple[Any, ...]:
    """All that the values of `tensor`, a dense one, depend on besides its memory, and the version of that."""
    return tensor.shape, version, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_neg()


def looks_as_now(tensor: Tensor) -> Callable[[Tensor], bool]:
    """A quick question: True only for a tensor that is `shown` as `tensor` is now, but for version and offset, which are to be asked too.

    It may say False of such a tensor as well: in inference mode of one that was asked about outside. It is what Dynamo's guards ask, in
    one call.
    """
    return _never if _guards is None else _guards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _never(tensor: Tensor) -> bool:
    return False


def mark(tensor: Tensor, what: object = None, *, beside_others: bool = True) -> Refusal:
    """Marks the memory of `tensor`, a dense one: `is_marked` says from now on whether anybody asked for write access to it. "" where it is
    marked, else why it cannot be.

    `what` is noted of the memory: there is one mark, so whoever sets it anew takes the place of whoever relied on it. Beside other Python
    threads a mark takes 10 microseconds instead of 1; with `beside_others=False` it is refused there.
    """
    storage = storage_of(tensor)
    storage._hmp_noted = what
    if not tensor.is_cpu or _copy_on_write is None or not _has_gil():
        return "device"  # or a torch, or a Python, that has no such mark
    if not storage.resizable():
        return "foreign memory"  # numpy shares it
    # counted here: what a function is given Dynamo's evaluator of frames holds once more
    if not _held_by_nobody_else(tensor, _use_count(storage._cdata) + sys.getrefcount(storage)):
        return "held elsewhere"
    if _c10d is not None and _c10d.GroupMember.WORLD is not None:
        return "process group"  # its threads write what they receive, and do not always hold the tensor
    try:
        if len(_frames()) == 1 and not _modes():
            _copy_on_write.lazy_clone(tensor)
        elif not beside_others or not _marked_while_others_wait(tensor, _copy_on_write.run_graph):
            return "other threads"
    except RuntimeError:  # memory that is not of torch's allocator: a file's, another process's
        return "foreign memory"
    return ""


# --- who else holds the memory --------------------------------------------------------------------------------------------


def _counted() -> tuple[int, int, int]:
    """How torch and Python count where nobody else holds anything: owners, holders, and holders of a view's base."""
    plain = torch.empty(1)
    storage = storage_of(plain)
    owners, holders = _use_count(storage._cdata) + sys.getrefcount(storage), _holders(plain)
    view: Any = plain.view(1)
    return owners, holders, _holders(view._base)


_SOLE_OWNER, _SOLE_HOLDER, _HOLDER_OF_A_BASE = _counted()


def _held_by_nobody_else(tensor: Tensor, owners: int) -> bool:
    """Whether the tensor, with the one that it is a view of, is all that holds its memory, and no C++ code holds the tensor.

    A dlpack capsule holds the memory, a collective that is under way the tensor, and so does a graph that saved it.
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
    with torch.inference_mode(False):  # the node that adds up a leaf's gradients lives as long as any graph with it, and holds the leaf
        return get_gradient_edge(tensor) is not None and _holders(tensor) == _SOLE_HOLDER + 1


# --- what other threads are in --------------------------------------------------------------------------------------------

# torch's mark is not made for threads: where one is set while another thread enters a write, the process aborts or hangs. So it is set
# while this thread has the GIL and every other one is at a place that does not write: before any of them can write it needs the GIL. A
# place is the code and the instruction that a thread's innermost Python frame is at. What is missing here costs speed and nothing else.
_Place = tuple[types.CodeType, int]
_place: Callable[[types.FrameType], _Place] = operator.attrgetter("f_code", "f_lasti")

# Functions of Python's own that wait, and do nothing else.
_WAITS = {
    "threading": ("Condition.wait", "Thread.join", "Thread._wait_for_tstate_lock"),
    "concurrent.futures.thread": ("_worker",),
    "selectors": ("SelectSelector._select",),
    "multiprocessing.popen_fork": ("Popen.poll",),
    "subprocess": ("Popen._try_wait",),
}
# Functions written in C whose name says that they wait: no function of torch's that writes a tensor is called so.
_WAITING = frozenset(
    """accept acquire get join next_event poll read read1 readinto readline receive recv recv_into recvfrom recvmsg select sigwait sleep
    waitpid zmq_proxy device proxy""".split()
)
_harmless: set[types.CodeType] = set()
_looked_in: set[str] = set()

# The put-off copy dies inside. This way of running it keeps the GIL, where torch's functions let go of it.
_MARKING = """graph(%tensor : Tensor):
  %copy : Tensor = aten::_lazy_clone(%tensor)
  %marked : bool = prim::Constant[value=1]()
  return (%marked)"""


def reads_only(code: types.CodeType) -> None:
    """Notes that whatever a function with this code calls directly, as long as that is no Python function, writes no tensor."""
    _harmless.add(code)


@functools.cache
def _marking() -> Any:
    return torch_private.parse_graph(_MARKING)


def _marked_while_others_wait(tensor: Tensor, run_graph: Callable[..., Any]) -> bool:
    """Whether the tensor was marked: only while every other Python thread waits or reads."""
    places = _places_of_threads()
    del places[threading.get_ident()]
    if not all(map(_is_harmless, places.values())):
        return False
    allowed = _OWN_PLACES.union(places.values())
    at_these_places = map(allowed.issuperset, map(map, itertools.repeat(_place), map(dict.values, itertools.starmap(_frames, ((),)))))
    marked = map(run_graph, itertools.repeat(_marking()), zip(itertools.compress((tensor,), at_these_places)))
    collecting = gc.isenabled()
    gc.disable()  # a finalizer of somebody's would be bytecode
    try:
        return _in_one_go(marked)
    finally:
        if collecting:
            gc.enable()


def _places_of_threads() -> dict[int, _Place]:
    """Where each Python thread is. No frame outlives this: in a variable of its own, it would keep alive whatever its callers hold."""
    return {thread: _place(frame) for thread, frame in _frames().items()}


def _in_one_go(steps: Iterable[Any]) -> bool:
    """Whether one of the steps gives something true. They are made of functions written in C: from the second look at the other threads to
    the end of the marking no bytecode runs here, so that none of them gets the GIL in between."""
    return any(steps)


# Where a thread is while `_in_one_go` is under way: which instruction makes the call changes when Python has seen it a few times.
_OWN_PLACES = frozenset((_in_one_go.__code__, at) for at in range(len(_in_one_go.__code__.co_code)))


def _is_harmless(place: _Place) -> bool:
    """Whether a thread at `place` writes no tensor before it needs the GIL."""
    for name in _WAITS.keys() - _looked_in:
        module = sys.modules.get(name)
        if module is not None:
            _looked_in.add(name)
            _harmless.update(filter(None, (_code_at(module, path) for path in _WAITS[name])))
    return place[0] in _harmless or _waits(place)


def _code_at(owner: Any, path: str) -> types.CodeType | None:
    """The code of the function there, None where this Python has none."""
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return getattr(owner, "__code__", None)


@functools.lru_cache(maxsize=256)
def _waits(place: _Place) -> bool:
    """Whether the call at `place`, if it is of a function written in C, is of one that waits: `connection.recv(...)`, by its name."""
    if sys.version_info < (3, 11):
        return False  # where a call's function comes from cannot be told
    code, at = place
    instructions = list(dis.get_instructions(code))
    call = next((i for i in instructions if i.offset == at and i.opname in ("CALL", "PRECALL", "CALL_KW", "CALL_FUNCTION_EX")), None)
    if call is None or call.positions is None:
        return False
    begin = call.positions[0], call.positions[2]
    # what was done last from where the call begins gives the function: the load of `recv` in `a.b.recv(c.d)`, the call in `a.get(b)(c.d)`
    before = (i for i in instructions if i.offset < at and i.positions and i.positions != call.positions and i.opname != "PUSH_NULL")
    gives = [i for i in before if i.positions and (i.positions[0], i.positions[2]) == begin]
    last = max(gives, key=lambda i: (i.positions[1] or 0, i.positions[3] or 0, i.offset) if i.positions else (0, 0, 0), default=None)
    return last is not None and last.opname.startswith("LOAD") and str(last.argval).lstrip("_") in _WAITING
