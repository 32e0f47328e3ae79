"""A process forked while another thread holds a lock of hmp's converts, enters contexts, runs a model and answers questions.

No public call holds a lock at a known time.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

import hmp
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
