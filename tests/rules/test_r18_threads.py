"""R18 beside other threads: no product of a write ago, no abort, whatever the writer's pace and wherever in a cast its write falls."""

from __future__ import annotations

import dis
import gc
import multiprocessing
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.caches import activation_cache, cast_cache, weight_cache, write_marks
from memory_writers import WRITERS
from thread_kit import in_thread

BF16 = torch.bfloat16
LISTS = hmp.Policy("low", bf16={"linear"})


# --- at every point of a cast ---------------------------------------------------------------------------------------------


_OURS = {module.__file__ for module in (activation_cache, cast_cache, weight_cache, write_marks)}


def _with_a_write_at(point: int, write: Callable[[], None], function: Callable[[], Any]) -> tuple[Any, int]:
    """What `function` returns when `write` runs before the `point`th bytecode of the caches, and how many bytecodes there were."""
    passed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if frame.f_code.co_filename not in _OURS:
            return None
        frame.f_trace_opcodes = True  # lines stay traced: Python 3.13 and 3.14 else trace no bytecode of a function's first call
        if event == "opcode":
            passed += 1
            if passed == point:
                sys.settrace(None)
                write()
                sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        return function(), passed
    finally:
        sys.settrace(None)


def _in_thread(writer: Callable[[torch.Tensor, float], Any], tensor: torch.Tensor) -> Callable[[], None]:
    def write() -> None:
        in_thread(writer, tensor, 5.0)

    return write


def _tensor(kind: str) -> torch.Tensor:
    tensor = torch.randn(96, 96, generator=torch.Generator().manual_seed(1))
    return tensor if kind == "activation" else torch.nn.Parameter(tensor, requires_grad=kind == "training")


@pytest.mark.parametrize(
    ("kind", "writer", "before"),
    [
        ("weight", "data", (1,)),
        *(pytest.param(kind, "fill_", (0, 1, 2), marks=pytest.mark.slow) for kind in ("training", "activation")),
        pytest.param("weight", "apply_", (0, 1, 2), marks=pytest.mark.nightly),
    ],
)
def test_r18_a_write_at_any_point_of_a_cast_is_seen_by_the_next(kind: str, writer: str, before: tuple[int, ...]) -> None:
    """The cast itself may see the old values or the new ones, or some of each; whoever casts afterwards sees the new ones."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(kind == "training"):
            return cast_cache.cast_product_input(tensor, BF16).detach()

    hmp.clear_cache()
    _with_a_write_at(0, lambda: None, lambda: cast(_tensor(kind)))  # Python 3.12 traces no bytecode the first time
    for casts_before in before:
        point, last = 1, sys.maxsize
        while point <= last:
            gc.collect(0)  # the weights of points before: while they are alive each cast goes through them
            tensor = _tensor(kind)
            for _ in range(casts_before):
                cast(tensor)
            _, last = _with_a_write_at(point, _in_thread(WRITERS[writer], tensor), lambda tensor=tensor: cast(tensor))
            for _ in range(3):
                assert torch.equal(cast(tensor), tensor.detach().clone().to(BF16)), f"after {casts_before} casts, before bytecode {point}"
            point += 1
        assert last > 20


# --- writers of every pace ------------------------------------------------------------------------------------------------


def _race(pace: float, seconds: float, serving: str) -> int:
    """How many casts were saved while two threads served and one wrote; fails where a product was of a write ago, or the process died."""
    script = Path(__file__).with_name("write_race.py")
    command = [sys.executable, str(script), str(pace), str(seconds), serving]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(script.parents[2]), str(script.parent)))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split(" products, ")[1].split(" casts saved")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "serving", "seconds"),
    [
        (0.0005, "queue", 2),
        *(pytest.param(pace, serving, 10, marks=pytest.mark.nightly) for pace in (0, 0.0001, 0.01) for serving in ("loop", "queue")),
    ],
)
def test_r18_servers_beside_a_writer_see_each_write(pace: float, serving: str, seconds: int) -> None:
    saved = _race(pace, seconds, serving)
    assert saved > 100 or pace == 0 or seconds < 10, "next to nothing was read from a copy: it says nothing about copies"


# --- what a thread is in --------------------------------------------------------------------------------------------------


def _wait_for_a_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    threading.Timer(0.5, child.stdin.close).start()  # type: ignore[union-attr]
    child.wait()


class _Ended:
    """Ends what the waits below wait for."""

    def __init__(self) -> None:
        self.event, self.condition = threading.Event(), threading.Condition()
        self.queue: queue.Queue[None] = queue.Queue()
        self.simple_queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.here, self.there = socket.socketpair()
        self.receiving, self.sending = multiprocessing.Pipe()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.pool = ThreadPoolExecutor(1)
        self.slow = threading.Thread(target=self.event.wait)
        self.slow.start()

    def end(self) -> None:
        self.event.set()
        self.queue.put(None)
        self.simple_queue.put(None)
        self.there.send(b"\n")
        self.sending.send(None)
        with self.condition:
            self.condition.notify_all()
        socket.create_connection(self.listening.getsockname()).close()
        self.pool.shutdown()

    def select(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.here, selectors.EVENT_READ)
            selector.select()

    def wait_for_notify(self) -> None:
        with self.condition:
            self.condition.wait()


WAITS: dict[str, Callable[[_Ended], Callable[[], Any]]] = {
    "Event.wait": lambda ended: ended.event.wait,
    "Condition.wait": lambda ended: ended.wait_for_notify,
    "Thread.join": lambda ended: ended.slow.join,
    "Queue.get": lambda ended: ended.queue.get,
    "selector": lambda ended: ended.select,
    "socket.accept": lambda ended: ended.listening.accept,
    "a line of a socket": lambda ended: ended.here.makefile("rb").readline,
    "Pipe": lambda ended: ended.receiving.recv,
    "an idle pool": lambda ended: lambda: ended.pool.submit(int).result() or ended.event.wait(),
    "a future": lambda ended: ended.pool.submit(ended.event.wait).result,
    "sleep": lambda ended: lambda: [time.sleep(0.01) for _ in iter(ended.event.is_set, True)],
    "a file": lambda ended: lambda: os.fdopen(ended.receiving.fileno(), "rb", closefd=False).read(1),
    "SimpleQueue": lambda ended: lambda: (ended.simple_queue.get(), len("x")),
    "in somebody's function": lambda ended: lambda: (len([1]), ended.here.recv(max(1, len("x")))),
    "a child process": lambda ended: lambda: (_wait_for_a_child(), ended.event.wait()),
}


@contextmanager
def _threads_in(functions: list[Callable[[], Any]], ended: list[_Ended]) -> Iterator[None]:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        for each in ended:
            each.end()
        for thread in threads:
            thread.join()


def _refused() -> str:
    """Why no copy of a weight is kept here, "" where one is."""
    weight = torch.nn.Parameter(torch.randn(4, 64))
    hmp.clear_cache()
    with torch.no_grad():
        F.linear(torch.ones(1, 64), weight)
    info = hmp.cache_info()
    return "" if info.entries else ", ".join(info.refused)


@pytest.mark.parametrize("names", [list(WAITS), *(pytest.param([name], id=name, marks=pytest.mark.nightly) for name in WAITS)])
def test_r18_a_copy_is_kept_while_others_wait(names: list[str]) -> None:
    """All at once; each by itself at night, to find which one it is."""
    ended = [_Ended() for _ in names]
    with hmp.casts(LISTS), _threads_in([WAITS[name](each) for name, each in zip(names, ended, strict=True)], ended):
        give_up = time.monotonic() + 30
        while (why := _refused()) and time.monotonic() < give_up:
            time.sleep(0.01)  # a thread is on its way
        assert not why


def test_r18_no_copy_is_kept_beside_a_thread_that_may_be_in_a_write() -> None:
    busy, stop = threading.Event(), threading.Event()

    def compute() -> None:
        busy.set()
        other = torch.zeros(1_000_000)
        while not stop.is_set():
            other.add_(1)

    with hmp.casts(LISTS), _threads_in([compute], []):
        busy.wait()
        try:
            assert {_refused() for _ in range(20)} == {"other threads"}
        finally:
            stop.set()


def test_r18_a_name_says_nothing_of_what_is_found_by_it() -> None:
    """`table.get("fill_")(tensor, 1)` is a call of what was found, and none of `get`."""

    class Table(dict[str, Any]):
        recv = dict.__getitem__

    table, name, done = Table(fill=torch.Tensor.fill_), "fill", [torch.zeros(1).fill_]
    calls = (
        lambda: table.get("fill")(1), lambda: table.get(name)(1, 2), lambda: table.recv("fill")(*name), lambda: done[0](table.get(1)),
        lambda: (table.get)(1)(2), lambda: (name or table.get)(1), lambda: table.get("recv")(1)(**name), lambda: table.fill(table.get(1)),
    )  # fmt: skip
    for call in calls:
        places = [i.offset for i in dis.get_instructions(call.__code__) if i.opname.startswith(("CALL", "PRECALL"))]
        assert not write_marks._waits((call.__code__, places[-1])), dis.Bytecode(call).dis()
    waits = lambda: table.get(name, done[0])  # noqa: E731
    assert any(write_marks._waits((waits.__code__, i.offset)) for i in dis.get_instructions(waits.__code__))


def test_r18_no_function_that_writes_a_tensor_is_called_as_those_that_wait_are() -> None:
    owners = (torch.Tensor, torch.UntypedStorage, torch, torch._C, torch._C._nn, torch._C._VariableFunctions, torch.ops.aten)
    found = {name for owner in owners for name in dir(owner) if name.lstrip("_") in write_marks._WAITING}
    # a view, a class, and what copies or makes none
    assert found <= {"select", "device", "_get", "_join"}, found


def test_r18_a_mark_keeps_nothing_alive_of_who_asked_for_it_and_garbage_is_collected_as_before() -> None:
    """A frame that refers to itself lives until garbage is collected, and with it whatever its callers hold."""

    def caller() -> weakref.ref[torch.Tensor]:
        weight = torch.randn(4, 4)
        while write_marks.mark(weight):
            time.sleep(0.01)
        return weakref.ref(weight)

    ended = _Ended()
    with _threads_in([ended.event.wait], [ended]):
        try:
            for collecting in (True, False):
                (gc.enable if collecting else gc.disable)()
                assert caller()() is None or collecting
                assert gc.isenabled() is collecting
        finally:
            gc.enable()
