"""A process forked while another thread holds a lock of hmp's; what other threads are making while all objects are searched; listeners.

No public call holds a lock or looks at Python's objects at a known time, or makes a tool raise where another one listens.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hmp
from hmp.core.observe import Call, Listener, listen
from hmp.core.patching import names
from trap_kit import policy

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork()")

BF16 = torch.bfloat16
LISTS, OTHER = policy(bf16=["linear"]), policy(bf16=["matmul"])


def _works() -> bool:
    """Whether all that takes a lock can be done, in a process that holds `LISTS`."""
    x, model = torch.ones(2, 2), torch.nn.Linear(2, 2)
    seen = [model(x).dtype]
    with hmp.casts(OTHER):
        seen.append((x @ x).dtype)
    with hmp.convert(policy=OTHER), hmp.record() as report:
        seen.append((x @ x).dtype)
    hmp.convert(policy=LISTS)
    hmp.revert()
    return seen == [BF16, BF16, BF16] and len(report.rows) > 0 and hmp.fallbacks() == {}


def _in_child(function: Callable[[], bool]) -> int:
    """The exit status of a forked process: 0 where `function` is true there; it is killed when it takes long."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("name", ["hmp.core.tables.lock", "hmp.core.observe._lock"])
def test_a_process_forked_while_another_thread_holds_a_lock_can_do_everything(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    lock = getattr(importlib.import_module(module), attribute)
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(30)

    with hmp.convert(policy=LISTS):
        torch.nn.Linear(2, 2)(torch.ones(2, 2))
        holder = threading.Thread(target=hold)
        holder.start()
        assert taken.wait(30)
        try:
            assert _in_child(_works) == 0
            assert not lock.acquire(blocking=False)  # in the parent it is held on
        finally:
            done.set()
            holder.join()


@pytest.mark.slow
def test_tuples_that_other_threads_are_making_are_left_alone_by_the_search() -> None:
    """Python refuses to finish a tuple that somebody else refers to, and a list of all objects refers to it."""
    errors: list[BaseException] = []
    done = threading.Event()
    model = torch.nn.Identity()

    def work() -> None:
        try:
            while not done.is_set():
                assert len(tuple(x for x in range(40))) == 40
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        found = [names.instances(torch.nn.Module) for _ in range(5)]
    finally:
        done.set()
        for thread in threads:
            thread.join()
        gc.enable()
    assert all(any(o is model for o in each) for each in found)
    assert errors == []


def test_a_listener_that_raises_leaves_the_call_to_those_after_it() -> None:
    heard: list[str] = []

    class Raises(Listener):
        unlisted = True

        def end(self, call: Call) -> None:
            raise ValueError("no more")

    class Hears(Listener):
        unlisted = True

        def end(self, call: Call) -> None:
            heard.append(call.op)

    x = torch.randn(2, 4)
    with hmp.casts("habana"), listen(Raises(), Hears()):
        for op in (torch.nn.functional.linear, torch.special.ndtr):
            with pytest.raises(ValueError, match="no more"):
                op(*([x, x] if op is torch.nn.functional.linear else [x]))
    assert heard[0] == "linear" and len(heard) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_listener_of_aten_computes_itself_reaches_no_other_one(order: int) -> None:
    heard: list[str] = []

    class Hears(Listener):
        def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            heard.append(func._schema.name)
            return run(*args, **kwargs)

    class Computes(Listener):
        def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            torch.neg(args[0])
            return run(*args, **kwargs)

    first, second = (Hears(), Computes())[::order]
    x = torch.ones(2)
    with listen(first), listen(second):
        torch.exp(x)
    assert heard == ["aten::exp"]
