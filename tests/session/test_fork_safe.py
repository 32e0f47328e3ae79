"""A process forked while another thread holds a lock of hmp's converts, enters regions, runs a model and answers questions."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hmp
from hmp import fork_safe
from thread_kit import in_thread
from trap_kit import policy

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork()")

BF16, F32 = torch.bfloat16, torch.float32
LOCKS = [
    "hmp.session.compiled_policies.lock",
    "hmp.dispatch.dispatchers._lock",
    "hmp.wrapping.kernel_fallback._lock",
    "hmp.compat.habana._lock",
]
LISTS, OTHER = policy(bf16=["linear"]), policy(bf16=["matmul"])


def _lock(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


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
    return seen == [BF16, BF16, BF16] and len(report.rows) > 0 and hmp.cache_info().limit > 0 and hmp.fallbacks() == {}


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("released", [True, False], ids=["released in time", "held on"])
def test_a_process_forked_while_another_thread_holds_a_lock_can_do_everything(
    name: str, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = _lock(name)
    monkeypatch.setattr(fork_safe, "PATIENCE", 20.0 if released else 0.05)
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


def test_a_fork_holds_every_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_safe, "PATIENCE", 1.0)
    fork_safe._before()
    try:
        assert all(lock._is_owned() for lock in list(fork_safe._locks))
    finally:
        fork_safe._after_in_parent()


def test_who_holds_a_lock_and_forks_holds_it_in_the_child_as_well() -> None:
    lock = fork_safe.RLock()

    def only_ours() -> bool:
        taken = []
        in_thread(lambda: taken.append(lock.acquire(blocking=False)))
        lock.release()
        return taken == [False] and lock.acquire(blocking=False)

    for patience in (10.0, 0.0):
        fork_safe.PATIENCE, before = patience, fork_safe.PATIENCE
        try:
            with lock:
                assert _in_child(only_ours) == 0
        finally:
            fork_safe.PATIENCE = before


def test_two_locks_that_are_taken_in_either_order_are_no_deadlock_for_a_fork() -> None:
    one, two = fork_safe.RLock(), fork_safe.RLock()
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
        assert [_in_child(lambda: one.acquire(blocking=False) and two.acquire(blocking=False)) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_lock_that_nobody_refers_to_is_gone() -> None:
    before = len(fork_safe._locks)
    lock = fork_safe.RLock()
    assert len(fork_safe._locks) == before + 1
    del lock
    assert len(fork_safe._locks) == before


@pytest.mark.slow
def test_importing_hmp_alone_makes_forks_safe() -> None:
    code = "import hmp, os; p = os.fork(); os._exit(0) if p == 0 else None; assert os.waitpid(p, 0)[1] == 0"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
