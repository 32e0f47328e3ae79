"""A wrapper is made at its first call: whoever calls first, from wherever, gets what the active policy says."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

BF16, F32 = torch.bfloat16, torch.float32
x = torch.randn(3, 3)
OPS = (lambda: torch.matmul(x, x), lambda: x @ x, lambda: F.linear(x, x), lambda: torch.mm(x, mat2=x), lambda: F.softmax(x, 0))
LISTS = policy(bf16={"matmul", "linear", "mm", "softmax"})
OTHER = policy(bf16={"softmax"}, fp32={"matmul", "linear", "mm"})


def test_first_calls_at_once_in_many_threads_are_cast() -> None:
    threads = 6
    start = threading.Barrier(threads + 1)
    seen: list[list[torch.dtype]] = []

    def call() -> None:
        for _ in range(10):
            start.wait(30)
            seen.append([op().dtype for op in OPS])
            start.wait(30)

    running = [threading.Thread(target=call) for _ in range(threads)]
    for thread in running:
        thread.start()
    for turn in range(10):
        # another list each time, otherwise nothing is a first call
        with hmp.convert(policy=OTHER if turn % 2 else LISTS):
            start.wait(30)
            start.wait(30)
        want = [F32] * 4 + [BF16] if turn % 2 else [BF16] * 5
        assert seen[threads * turn :] == [want] * threads
    for thread in running:
        thread.join()
