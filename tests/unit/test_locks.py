"""A process forked while another thread holds a lock of hmp's converts, enters regions, runs a model and answers questions.

No public call holds a lock at a known time.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hmp
from hmp.core import locks
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


@pytest.mark.parametrize(
    ("name", "released"),
    [("hmp.core.convert.policy_tables.lock", True), ("hmp.core.observe._lock", False)],
    ids=["in time", "held on"],
)
def test_a_process_forked_while_another_thread_holds_a_lock_can_do_everything(
    name: str, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, attribute = name.rpartition(".")
    lock = getattr(importlib.import_module(module), attribute)
    monkeypatch.setattr(locks, "PATIENCE", 20.0 if released else 0.05)
    taken, done = threading.Event(), threading.Event()
    order = []

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(30)
            order.append("released")

    with hmp.convert(policy=LISTS):
        torch.nn.Linear(2, 2)(torch.ones(2, 2))
        holder = threading.Thread(target=hold)
        holder.start()
        assert taken.wait(30)
        if released:
            threading.Timer(0.2, done.set).start()
        try:
            status = _in_child(lambda: order == (["released"] if released else []) and _works())
        finally:
            done.set()
            holder.join()
        assert status == 0
        assert lock.acquire(blocking=False)  # and the parent has its own back
        lock.release()


def test_two_locks_that_are_taken_in_either_order_are_no_deadlock_for_a_fork() -> None:
    one, two = locks.RLock(), locks.RLock()
    stop = threading.Event()

    def take(first: Any, second: Any) -> None:
        while not stop.is_set():
            time.sleep(0.001)
            with first:
                if second.acquire(timeout=0.01):
                    second.release()

    threads = [threading.Thread(target=take, args=order) for order in ((one, two), (two, one))]
    for thread in threads:
        thread.start()
    try:
        assert [_in_child(lambda: one.acquire(blocking=False) and two.acquire(blocking=False)) for _ in range(5)] == [0] * 5
    finally:
        stop.set()
        for thread in threads:
            thread.join()
