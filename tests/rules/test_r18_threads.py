"""R18 beside other threads: no product of a write ago, no abort, whatever the writer's pace and wherever in a cast its write falls."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from low_kernels_kit import as_computed
from memory_writers import WRITERS
from thread_kit import in_thread, in_threads, without_other_threads

BF16 = torch.bfloat16
LISTS = hmp.Policy("low", bf16={"linear"})


# --- at every point of a cast ---------------------------------------------------------------------------------------------


_HMP = os.path.dirname(hmp.__file__)


def _with_a_write_at(point: int, write: Callable[[], None], function: Callable[[], Any]) -> tuple[Any, int]:
    """What `function` returns when `write` runs before the `point`th bytecode of hmp's caches, and how many bytecodes there were."""
    passed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        file = frame.f_code.co_filename
        if not file.startswith(_HMP) or "cache" not in file.removeprefix(_HMP):
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


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _tensor(kind: str) -> torch.Tensor:
    # an activation of 1 MiB, from which on a copy is kept
    return _random(512, 512) if kind == "activation" else torch.nn.Parameter(_random(96, 96), requires_grad=kind == "training")


@pytest.mark.parametrize(
    ("kind", "writer", "before"),
    [
        ("weight", "data", (1,)),
        *(pytest.param(kind, "fill_", (0, 1, 2), marks=pytest.mark.slow) for kind in ("training", "activation")),
        pytest.param("weight", "apply_", (0, 1, 2), marks=pytest.mark.nightly),
    ],
)
def test_r18_a_write_at_any_point_of_a_product_is_seen_by_the_next(kind: str, writer: str, before: tuple[int, ...]) -> None:
    """The product itself may see the old values or the new ones, or some of each; whoever multiplies afterwards sees the new ones."""
    other = _random(2, 512 if kind == "activation" else 96)

    def product(tensor: torch.Tensor, linear: Callable[..., torch.Tensor] = lambda *args: F.linear(*args)) -> torch.Tensor:
        with torch.set_grad_enabled(kind == "training"):
            return linear(*((tensor, other) if kind == "activation" else (other, tensor))).detach()

    def by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with hmp.disable_casts():
            return as_computed(F.linear)(x.clone().to(BF16), weight.clone().to(BF16))

    with hmp.casts(LISTS):
        _with_a_write_at(0, lambda: None, lambda: product(_tensor(kind)))  # Python 3.12 traces no bytecode the first time
        for products_before in before:
            point, last = 1, sys.maxsize
            while point <= last:
                gc.collect(0)  # the weights of points before: while they are alive each cast goes through them
                tensor = _tensor(kind)
                for _ in range(products_before):
                    product(tensor)
                _, last = _with_a_write_at(point, _in_thread(WRITERS[writer], tensor), lambda tensor=tensor: product(tensor))
                for _ in range(3):
                    told = f"after {products_before} products, before bytecode {point}"
                    assert torch.equal(product(tensor), product(tensor, by_hand)), told
                point += 1
            assert last > 20


# --- writers of every pace ------------------------------------------------------------------------------------------------


SIZE = 256  # large enough that a write meets a cast that is under way
MOST = 1500  # every whole number up to 2,048 is one of float16's
ONE_HOT = torch.zeros(1, SIZE)
ONE_HOT[0, 0] = 1.0


class _Round:
    """A weight's life: it is served and written at the same time, and served once more when nobody writes any more.

    It counts its writes in all its elements, and a product with a one-hot row gives the count back, exactly: a product may not give a count
    from before the product began.
    """

    def __init__(self, pace: float, seconds: float) -> None:
        self.weight, self.begun, self.done = torch.nn.Parameter(torch.zeros(SIZE, SIZE)), 0, 0
        self.ended, self.pace, self.until = threading.Event(), pace, time.monotonic() + seconds

    def write(self) -> None:
        while self.done < MOST and time.monotonic() < self.until:
            self.begun += 1
            with torch.no_grad():
                (self.weight.data if self.begun % 3 == 0 else self.weight).fill_(self.begun)
            self.done = self.begun
            if self.pace:
                self.ended.wait(self.pace)  # as a thread waits: nobody sets it
        self.ended.set()

    def serve(self) -> None:
        written = self.done
        with torch.no_grad():
            counts = F.linear(ONE_HOT, self.weight)
        least, most = counts.min().item(), counts.max().item()
        assert written <= least <= most <= self.begun, f"gives {least:g} to {most:g}: {written} writes were done, {self.begun} begun"

    def serve_on(self, wait: float) -> None:
        while not self.ended.wait(wait) if wait else not self.ended.is_set():
            for _ in range(3):
                self.serve()


def _race(pace: float, seconds: float, wait: float) -> None:
    """Two threads serve, with a wait between their requests, and one writes, with a pace of its own."""
    end = time.monotonic() + seconds
    with hmp.convert(policy=hmp.Policy("half", bf16={"linear"}, dtype=torch.float16)):
        while time.monotonic() < end:
            this = _Round(pace, min(2.0, seconds))
            address = this.weight.data_ptr()
            in_threads(lambda work: work(), [lambda this=this: this.serve_on(wait)] * 2 + [this.write])
            for _ in range(3):
                this.serve()
            assert this.weight.data_ptr() == address, "the weight has moved: a write met a mark half set"
        saved = hmp.cache_info().hits
    assert saved > 100 or pace == 0 or seconds < 10, "next to nothing was read from a copy: it says nothing about copies"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "wait", "seconds"),
    [
        (0.0005, 0.0005, 2),
        *(pytest.param(pace, wait, 10, marks=pytest.mark.nightly) for pace in (0, 0.0001, 0.01) for wait in (0, 0.0005)),
    ],
)
def test_r18_servers_beside_a_writer_see_each_write(pace: float, wait: float, seconds: int) -> None:
    """In a process of their own, which may die of it."""
    without_other_threads(lambda: _race(pace, seconds, wait))


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
if sys.version_info < (3, 11):  # where waits that user code calls itself count as calls that may write
    for _called_by_users in ("sleep", "a file", "SimpleQueue", "in somebody's function"):
        del WAITS[_called_by_users]


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
            assert all("other threads" in _refused() for _ in range(20))
        finally:
            stop.set()
